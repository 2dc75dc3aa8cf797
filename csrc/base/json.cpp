#include "base/json.h"
#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

namespace brimful {

std::string lists_to_json(const std::vector<std::vector<int64_t>>& lists) {
  return nlohmann::json(lists).dump();
}

std::vector<std::vector<int64_t>> lists_from_json(const std::string& text) {
  try {
    return nlohmann::json::parse(text).get<std::vector<std::vector<int64_t>>>();
  } catch (const nlohmann::json::exception& error) {
    TORCH_CHECK_VALUE(false, "not a JSON list of lists of integers (error: ", error.what(), ")");
  }
}

std::string json_text(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string json_string(const std::string& text) {
  return json_text(text);
}

std::string valid_utf8(const std::string& text) {
  return nlohmann::json::parse(json_string(text)).get<std::string>();
}

}  // namespace brimful
