#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace brimful::memory {

/// Zeros on the host for values of `device` on their way to or from it. Pinned, so that no copy is waited for; where the host
/// has no pinned memory left they are not, and each copy is.
at::Tensor zeros_on_host(at::IntArrayRef sizes, at::ScalarType type, c10::Device device);

}  // namespace brimful::memory
