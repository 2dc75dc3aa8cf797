#pragma once
#include <brimful/export.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>

namespace c10d {
class ProcessGroup;  // defined in <torch/csrc/distributed/c10d/ProcessGroup.hpp>
}  // namespace c10d

namespace brimful {

/// Joins the process group that torchrun's environment variables describe: RANK, WORLD_SIZE,
/// MASTER_ADDR, MASTER_PORT, TORCHELASTIC_USE_AGENT_STORE and TORCHELASTIC_RESTART_COUNT. CPU tensors go over gloo. Where there
/// are CUDA devices, CUDA tensors go over NCCL: this rank's device is that of LOCAL_RANK (or the
/// only one that it sees), becomes the calling thread's current device and is the group's
/// getBoundDeviceId(). Blocks until all ranks have joined. The store is torchrun's where it serves
/// one, else rank 0 serves it. Gloo listens on the interfaces that GLOO_SOCKET_IFNAME lists, else on
/// this host's address, else on loopback.
/// Where there are CUDA devices and TORCH_NCCL_ASYNC_ERROR_HANDLING is not set it becomes 2 in this process: torch's watchdog
/// then aborts a communicator in which a rank is missing, and does not end the process.
/// All ranks must call it equally often; each call makes a group of its own. Callable from any
/// thread, but in the same order on every rank. Does not synchronise a device.
/// @throws c10::ValueError if a variable is missing, is not a number or does not fit the others or
/// the devices, or the timeout is not positive; c10::DistError if the ranks do not meet within
/// `timeout`; c10::NotImplementedError if brimful was built without gloo
BRIMFUL_API c10::intrusive_ptr<c10d::ProcessGroup> init_from_env(
    std::chrono::milliseconds timeout = std::chrono::minutes(30));

}  // namespace brimful
