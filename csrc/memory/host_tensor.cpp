#include "memory/host_tensor.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

namespace brimful::memory {

at::Tensor zeros_on_host(at::IntArrayRef sizes, at::ScalarType type, c10::Device device) {
  const at::TensorOptions options(type);
  if (device.is_cuda()) {
    try {
      return at::zeros(sizes, options.pinned_memory(true));
    } catch (const c10::Error&) {  // refused by the driver, whose error torch has taken
    }
  }
  return at::zeros(sizes, options);
}

ValuesOnHost::ValuesOnHost(const at::Tensor& values) {
  const Unlimited unlimited;
  const at::NoGradGuard no_grad;
  copy_ = zeros_on_host(values.sizes(), values.scalar_type(), values.device());
  copy_.copy_(values, /*non_blocking=*/true);
  if (const auto device = values.device(); !device.is_cpu()) {
    arrived_.emplace(device.type());
    arrived_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
}

const at::Tensor& ValuesOnHost::get() const {
  if (arrived_) {
    arrived_->synchronize();
  }
  return copy_;
}

}  // namespace brimful::memory
