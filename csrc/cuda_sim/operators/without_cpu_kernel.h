#pragma once
#include <torch/library.h>

namespace sim_operators {

/// Stand-ins for CUDA's kernels of operators that the CPU has no kernel of, in terms of other operators.
void implement_without_cpu_kernel(torch::Library& library);

}  // namespace sim_operators
