#include <brimful/step/distinct_tensors.h>
#include <brimful/step/standing_bytes.h>

#include "memory/tensor_bytes.h"

namespace brimful {
namespace {
int64_t bytes_on(c10::Device device, const at::Tensor& tensor) {
  return tensor.defined() && tensor.device() == device ? memory::bytes_of(tensor) : 0;
}
}  // namespace

StandingBytes standing_bytes(const std::vector<at::Tensor>& parameters,
                             const std::vector<at::Tensor>& buffers, c10::Device device) {
  StandingBytes standing;
  for (const auto& parameter : distinct_tensors(parameters)) {
    const auto bytes = bytes_on(device, parameter);
    standing.parameters += bytes;
    standing.float32 += parameter.scalar_type() == at::kFloat ? bytes : 0;
    standing.trainable += parameter.requires_grad() ? bytes : 0;
    standing.gradients += bytes_on(device, parameter.grad());
  }
  for (const auto& buffer : distinct_tensors(buffers)) {
    standing.buffers += bytes_on(device, buffer);
  }
  return standing;
}

}  // namespace brimful
