#include "base/format.h"
#include <array>
#include <charconv>
#include <cmath>
#include <system_error>

namespace brimful {

std::string format_bytes(int64_t bytes) {
  constexpr std::array kUnits{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  const std::string sign = bytes < 0 ? "-" : "";
  const uint64_t size = bytes < 0 ? -static_cast<uint64_t>(bytes) : static_cast<uint64_t>(bytes);
  if (size < 1024) {
    return sign + std::to_string(size) + " B";
  }
  for (size_t i = 0;; ++i) {
    const auto shift = 10 * (i + 1);
    const uint64_t rest = size & ((uint64_t{1} << shift) - 1);
    const uint64_t tenths =
        (size >> shift) * 10 + ((rest * 10 + (uint64_t{1} << (shift - 1))) >> shift);
    if (tenths < 10240 || i + 1 == kUnits.size()) {
      return sign + std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " " +
             kUnits[i];
    }
  }
}

std::string format_seconds(double seconds) {
  const auto tenths = std::llround(10 * seconds);
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " s";
}

std::string format_number(double value) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

std::optional<NumberInText> read_number(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || !std::isfinite(value)) {
    return std::nullopt;
  }
  return NumberInText{value, text.substr(static_cast<size_t>(end - text.data()))};
}

std::string format_count(int64_t count) {
  std::string text = std::to_string(count);
  for (auto at = static_cast<int64_t>(text.size()) - 3; at > 0; at -= 3) {
    text.insert(static_cast<size_t>(at), 1, ',');
  }
  return text;
}

std::string format_peak(int64_t bytes) {
  return bytes == 0 ? "unknown" : format_bytes(bytes);
}

std::string format_list(const std::vector<int>& numbers) {
  std::string text;
  for (const int number : numbers) {
    text += (text.empty() ? "" : ", ") + std::to_string(number);
  }
  return text;
}

std::string format_numbered(const std::vector<std::string>& entries) {
  std::string text;
  for (size_t i = 0; i < entries.size(); ++i) {
    text += (i == 0 ? "" : "; ") + std::to_string(i + 1) + ". " + entries[i];
  }
  return text;
}

}  // namespace brimful
