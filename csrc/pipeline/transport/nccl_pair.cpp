#include "pipeline/transport/nccl_pair.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace brimful::pipeline {

c10::intrusive_ptr<c10d::Backend> nccl_pair(c10d::ProcessGroup& group, const std::string& name,
                                            int end) {
  // Its few blocks do not wait behind those of what is computed.
  auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  options->timeout = group.getBackend(c10::DeviceType::CUDA)->getBackendOptions()->timeout;
  const auto store = c10::make_intrusive<c10d::PrefixStore>(name, group.getStore());
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, end, 2, std::move(options));
}

}  // namespace brimful::pipeline
