#pragma once
#include <brimful/export.h>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace brimful {

/// One JSON list of lists of integers.
BRIMFUL_API std::string lists_to_json(const std::vector<std::vector<int64_t>>& lists);

/// @throws c10::ValueError unless `text` is one JSON list of lists of integers
BRIMFUL_API std::vector<std::vector<int64_t>> lists_from_json(const std::string& text);

/// JSON on one line; what is not UTF-8 is replaced.
std::string json_text(const nlohmann::ordered_json& value);

/// One JSON string, quoted and escaped; what is not UTF-8 is replaced.
BRIMFUL_API std::string json_string(const std::string& text);

/// The text, with what is not UTF-8 replaced.
BRIMFUL_API std::string valid_utf8(const std::string& text);

}  // namespace brimful
