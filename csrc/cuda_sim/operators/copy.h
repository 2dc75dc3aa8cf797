#pragma once
#include <ATen/core/Tensor.h>

namespace sim_operators {

/// Torch's own copies, by the runtime's memcpy, but for those on a device that need a kernel.
at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking);

}  // namespace sim_operators
