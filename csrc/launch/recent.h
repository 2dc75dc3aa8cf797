#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

namespace brimful::launch {

constexpr size_t kRecent = 5;  // the median of so many steps is what a rank is like,
constexpr size_t kFewest = 3;  // or of so many at first

/// Of numbers that it puts into another order.
inline double median(std::span<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// The median of an odd number of the last steps whose `number(step)` is above 0; 0: too few are.
double recent_median(size_t steps, const auto& number) {
  std::array<double, kRecent> known{};
  size_t count = 0;
  for (size_t i = steps; i-- > 0 && count < kRecent;) {  // the last one first
    if (const double found = number(i); found > 0) {
      known[count++] = found;
    }
  }
  if (count < kFewest) {
    return 0;
  }
  return median(std::span(known).first(count < kRecent ? kFewest : kRecent));
}

}  // namespace brimful::launch
