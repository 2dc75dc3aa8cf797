#include <c10/util/Exception.h>

#include "launch/nccl_group.h"

namespace brimful::launch {

int nccl_device_count() {
  return 0;
}

void keep_process_on_nccl_errors() {}

void add_nccl(c10d::ProcessGroup& /*group*/, const c10::intrusive_ptr<c10d::Store>& /*store*/,
              int /*rank*/, int /*world_size*/, c10::Device device,
              std::chrono::milliseconds /*timeout*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "this build of brimful has no NCCL (device: ", device,
                              "); build it against a CUDA torch with CUDA's and NCCL's headers");
}

}  // namespace brimful::launch
