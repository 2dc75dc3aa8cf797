#pragma once
#include <nlohmann/json.hpp>
#include <string>

/// What a page of brimful's shows.
inline nlohmann::json page_data(const std::string& page) {
  const std::string begin = "id=data>";
  const auto from = page.find(begin) + begin.size();
  return nlohmann::json::parse(page.substr(from, page.find("</script>", from) - from));
}
