#pragma once
#include <brimful/export.h>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace brimful {

/// "512 B", "1.5 KiB", "23.4 MiB": one decimal, rounded to the nearest, whatever the locale.
BRIMFUL_API std::string format_bytes(int64_t bytes);

/// The same; "unknown" for 0, as a peak is where the device's allocator counts nothing.
BRIMFUL_API std::string format_peak(int64_t bytes);

/// "1800.0 s": one decimal, rounded to the nearest, whatever the locale. Not for a negative time.
BRIMFUL_API std::string format_seconds(double seconds);

/// The shortest text that reads as the same number, whatever the locale: "0.5", "1e+20".
BRIMFUL_API std::string format_number(double value);

/// A decimal number at the front of a text, whatever the locale, without what follows it: it has a point, no comma.
struct NumberInText {
  double value = 0;
  std::string_view rest;
};
/// Nothing if the text does not begin with one, or it is not finite.
BRIMFUL_API std::optional<NumberInText> read_number(std::string_view text);

/// "1,234,567".
BRIMFUL_API std::string format_count(int64_t count);

/// "0, 2, 5".
BRIMFUL_API std::string format_list(const std::vector<int>& numbers);

/// "1. this; 2. that".
BRIMFUL_API std::string format_numbered(const std::vector<std::string>& entries);

}  // namespace brimful
