#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/step/step.h>

namespace brimful {

/// Multiplies the gradients of a step by a number that lies on their device (0-dim, float64). Returns whether one of them is
/// not finite (0-dim, bool, there). Does not wait.
at::Tensor scale_gradients(const StepGroup& group, const at::Tensor& scale);

}  // namespace brimful
