#pragma once
#include <ATen/core/boxing/KernelFunction.h>

namespace sim_operators {

/// The stand-in for an operator's CUDA kernel: its CPU kernel, on CPU tensors that lie on the same memory.
void call_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// The same for an operator that torch lends a workspace of cuBLAS.
void call_with_workspace(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// The same for a convolution, where these take workspaces.
void call_with_convolution_workspace(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim_operators
