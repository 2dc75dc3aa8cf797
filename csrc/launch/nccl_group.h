#pragma once
#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <optional>

/// NCCL's side of a process group: nccl_group.cpp where there are CUDA's headers, else nccl_absent.cpp.
namespace brimful::launch {

/// CUDA devices that this process sees and NCCL can serve; 0 without a driver.
int nccl_device_count();

/// The device of this rank where the process sees `devices` of them: LOCAL_RANK's, or the only one. None if it sees none.
/// @throws c10::ValueError if LOCAL_RANK is missing, not a number or beyond the devices
std::optional<c10::Device> device_from_env(int devices);

/// Before the threads and groups of this process: unless the variable is set, torch's watchdog is to abort a communicator
/// in which a rank is missing, and not to end the process (TORCH_NCCL_ASYNC_ERROR_HANDLING=2).
void keep_process_on_nccl_errors();

/// Gives `group` NCCL for CUDA tensors, binds it to `device` and makes NCCL its default backend, as torch does for
/// "cpu:gloo,cuda:nccl". Ranks meet in their first collective on CUDA tensors, not here.
/// @throws c10::NotImplementedError in a build without CUDA
void add_nccl(c10d::ProcessGroup& group, const c10::intrusive_ptr<c10d::Store>& store, int rank,
              int world_size, c10::Device device, std::chrono::milliseconds timeout);

}  // namespace brimful::launch
