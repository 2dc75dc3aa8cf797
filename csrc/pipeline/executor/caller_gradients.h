#pragma once
#include <ATen/core/Tensor.h>
#include "pipeline/executor/executor.h"

#include <vector>

namespace brimful::pipeline {

/// Where a stage's graph begins at a tensor of the caller's.
struct CallerLeaf {
  at::Tensor tensor;
  at::Tensor leaf;  ///< on the stage's device, without the tensor's history
};

/// On the device; where `device` is not the CPU the host does not wait.
at::Tensor moved(const at::Tensor& tensor, c10::Device device);

/// What a stage takes in a tensor's place, on its device and cut off from its graph. Where it needs a gradient it is a leaf
/// that does, which `leaves`, if there are any, has then.
at::Tensor leaf_of(const at::Tensor& tensor, c10::Device device, std::vector<CallerLeaf>* leaves);

/// To that of the same tensor, if it is there. An undefined one is nothing.
void add_gradient(std::vector<CallerGradient>& gradients, const at::Tensor& tensor,
                  const at::Tensor& gradient);

/// Sends the gradients, times `scale`, through the graphs of the tensors, in one backward, to the leaves that they have come
/// from. If it throws, gradients are as before.
void give_back(const std::vector<CallerGradient>& gradients, double scale);

}  // namespace brimful::pipeline
