#include "memory/host_tensor.h"

#include <ATen/ATen.h>
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

}  // namespace brimful::memory
