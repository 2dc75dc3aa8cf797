#include "pipeline/transport/nccl_pair.h"

namespace brimful::pipeline {

c10::intrusive_ptr<c10d::Backend> nccl_pair(c10d::ProcessGroup& /*group*/,
                                            const std::string& /*name*/, int /*end*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "this build of brimful has no NCCL; build it against a CUDA torch with its headers");
}

}  // namespace brimful::pipeline
