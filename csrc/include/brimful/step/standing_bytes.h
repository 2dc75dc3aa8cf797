#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace brimful {

/// What stands in a device's memory whatever the batch, in bytes.
struct StandingBytes {
  int64_t parameters = 0;
  int64_t float32 = 0;    ///< of `parameters`, in float32
  int64_t trainable = 0;  ///< of `parameters`, those that need a gradient
  int64_t gradients = 0;  ///< that exist now
  std::optional<int64_t> optimizer_state;
  int64_t buffers = 0;
};

/// Those of the tensors that are on `device`; the optimizer's state is not known.
BRIMFUL_API StandingBytes standing_bytes(const std::vector<at::Tensor>& parameters,
                                         const std::vector<at::Tensor>& buffers,
                                         c10::Device device);

}  // namespace brimful
