#include "step/no_capture.h"

#include <c10/util/Exception.h>

#include "memory/cuda.h"

namespace brimful {

void require_no_capture(c10::Device device, const char* what) {
  TORCH_CHECK(
      !device.is_cuda() || memory::cuda_is_capturing(device) != true, what,
      " cannot be captured into a CUDA graph (device: ", device,
      "): it is decided on the host whether a step is repeated; capture the module instead, "
      "with torch.cuda.make_graphed_callables");
}

}  // namespace brimful
