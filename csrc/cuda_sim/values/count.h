#pragma once
#include <ATen/core/ivalue.h>

#include <optional>

#include "operators.h"

namespace sim_values {

/// Along which dimension it counts; none: it counts values.
std::optional<int64_t> counted_dimension(const Operator& op,
                                         c10::ArrayRef<const c10::IValue> inputs);
/// From here on, in this thread, what such an operator reads of the device is how many results it has. Where that is
/// not known it is the least or the most that can be (SIM_CUDA_UNKNOWN).
void enter_count(const Operator& op, c10::ArrayRef<const c10::IValue> inputs,
                 std::optional<int64_t> known);
void leave_count();
/// Writes the count that is expected; false if none is.
bool answer_count(void* to, size_t bytes);
/// Whether a count is expected that is not known.
bool count_is_unknown();

}  // namespace sim_values
