#pragma once
#include <brimful/export.h>

#include <cstdint>
#include <vector>

namespace brimful::pipeline {

/// How many layers each of `stages` stages has, one at least, so that the costliest stage costs as little as may be; of
/// those the most even. `costs`: of each layer, in order, such as its time. Pure.
/// @throws c10::ValueError for fewer layers than stages, no stage, or a cost that is negative or not finite
BRIMFUL_API std::vector<int64_t> balanced(const std::vector<double>& costs, int64_t stages);

}  // namespace brimful::pipeline
