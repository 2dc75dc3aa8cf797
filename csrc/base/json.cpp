#include "base/json.h"
#include <c10/util/Exception.h>
#include <cmath>
#include <nlohmann/json.hpp>

namespace brimful {

std::string to_json(const std::map<std::string, double>& values) {
  for (const auto& [key, value] : values) {
    TORCH_CHECK_VALUE(std::isfinite(value), "value must be finite to be saved (", key, ": ", value,
                      ")");
  }
  try {
    return nlohmann::json(values).dump();
  } catch (const nlohmann::json::exception& error) {
    TORCH_CHECK_VALUE(false, "key cannot be saved (error: ", error.what(), "); use UTF-8");
  }
}

std::map<std::string, double> from_json(const std::string& text) {
  try {
    std::map<std::string, double> values;
    const auto parsed = nlohmann::json::parse(text);
    TORCH_CHECK_VALUE(parsed.is_object(), "state must be a JSON object (type: ", parsed.type_name(),
                      ")");
    for (const auto& [key, value] : parsed.items()) {
      TORCH_CHECK_VALUE(value.is_number(), "state must hold numbers only (", key, ": ",
                        value.dump(), ")");
      values.emplace(key, value.get<double>());
    }
    return values;
  } catch (const nlohmann::json::exception& error) {
    TORCH_CHECK_VALUE(false, "state is not JSON (error: ", error.what(),
                      "); give what to_json wrote");
  }
}

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
