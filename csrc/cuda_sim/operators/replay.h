#pragma once
#include <ATen/core/boxing/KernelFunction.h>

#include <string>

namespace sim_operators {

/// Whether SIM_CUDA_REPLAY names a file, and it has this operator or this is a product.
bool is_replayed(const std::string& operator_name);

/// The stand-in for such an operator: while it is computed it takes what the file says, beside its results. The workspace
/// of products is kept from the first one on, as by torch, and not lent to each.
void call_replayed(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim_operators
