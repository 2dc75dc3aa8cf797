#include "launch/nccl_group.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/env.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace brimful::launch {

int nccl_device_count() {
  return c10::cuda::device_count();
}

void keep_process_on_nccl_errors() {
  c10::utils::set_env("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", /*overwrite=*/false);
}

void add_nccl(c10d::ProcessGroup& group, const c10::intrusive_ptr<c10d::Store>& store, int rank,
              int world_size, c10::Device device, std::chrono::milliseconds timeout) {
  constexpr auto kNccl = c10d::ProcessGroup::BackendType::NCCL;
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  // Gloo's keys of the same group are in the store too.
  const auto own_store = c10::make_intrusive<c10d::PrefixStore>("nccl", store);
  const auto backend =
      c10::make_intrusive<c10d::ProcessGroupNCCL>(own_store, rank, world_size, std::move(options));
  group.setBoundDeviceId(device);  // before setBackend, which hands it on
  group.setBackend(c10::DeviceType::CUDA, kNccl, backend);
  group.setDefaultBackend(kNccl);
}

}  // namespace brimful::launch
