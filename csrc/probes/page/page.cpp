#include "probes/page/page.h"
#include <nlohmann/json.hpp>
#include <string_view>
#include "base/json.h"
#include "memory/most_bytes_first.h"

namespace brimful::probes {

std::string page_of(const nlohmann::ordered_json& data) {
  constexpr std::string_view kPlace = "{{data}}";
  const std::string_view page = kPage;
  const auto place = page.find(kPlace);
  std::string text(page.substr(0, place));
  for (const char c : json_text(data)) {
    if (c == '<') {
      text += "\\u003c";  // a name may be "</script>"
    } else {
      text += c;
    }
  }
  return text.append(page.substr(place + kPlace.size()));
}

nlohmann::ordered_json categories_json(const memory::CategoryBytes& bytes) {
  auto list = nlohmann::ordered_json::array();
  for (const auto category : memory::most_bytes_first(bytes)) {
    list.push_back(
        {{"category", name_of(category)}, {"bytes", bytes[static_cast<size_t>(category)]}});
  }
  return list;
}

}  // namespace brimful::probes
