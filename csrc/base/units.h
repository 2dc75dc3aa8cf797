#pragma once
#include <cstdint>

namespace brimful {

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;

}  // namespace brimful
