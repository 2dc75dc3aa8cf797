#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace brimful::pairs {

/// The leaves that backward from `loss` reaches, and whether it reaches a node that was made before `since`
/// (at::sequence_number::peek() then).
struct Reached {
  std::vector<at::Tensor> leaves;
  bool older = false;
};
Reached reached_by(const at::Tensor& loss, uint64_t since);

/// A scalar with the value of `value`, whose backward hands `gradients` on to `tensors`, whatever it is seeded with.
at::Tensor seeded(const at::Tensor& value, const std::vector<at::Tensor>& tensors,
                  std::vector<at::Tensor> gradients);

}  // namespace brimful::pairs
