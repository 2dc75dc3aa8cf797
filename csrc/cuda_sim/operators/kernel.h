#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace sim_operators {

/// Calls the CPU's kernel; of half types in 32 bits where it has none for them.
void call_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim_operators
