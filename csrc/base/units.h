#pragma once
#include <cstdint>

namespace brimful {

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;

/// The next multiple of `step`.
constexpr int64_t round_up(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

}  // namespace brimful
