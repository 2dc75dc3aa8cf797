#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace brimful::probes {

/// What an operator indexes with, and what it may.
struct IndexUse {
  at::Tensor index;
  int64_t first = 0;
  int64_t last = 0;
  std::optional<int64_t> ignored;  ///< a value that stands for "none"
};

/// Of the operators that are known to index; empty for others, and for inputs that are not plain tensors.
std::vector<IndexUse> index_uses(std::string_view op, c10::ArrayRef<const c10::IValue> inputs);

struct IndexRange {
  int64_t lowest = 0;
  int64_t highest = 0;
};
/// Of `count` integers; nothing if there is none beside `ignored`.
template <typename Integer>
std::optional<IndexRange> range_of(const Integer* values, int64_t count,
                                   std::optional<int64_t> ignored) {
  std::optional<IndexRange> range;
  for (int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<int64_t>(values[i]);
    if (value == ignored) {
      continue;
    }
    range = range ? IndexRange{std::min(range->lowest, value), std::max(range->highest, value)}
                  : IndexRange{value, value};
  }
  return range;
}

}  // namespace brimful::probes
