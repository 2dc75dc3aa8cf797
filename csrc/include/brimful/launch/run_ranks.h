#pragma once
#include <brimful/export.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <vector>

namespace c10d {
class ProcessGroup;  // defined in <torch/csrc/distributed/c10d/ProcessGroup.hpp>
}  // namespace c10d

namespace brimful {

struct RanksOptions {
  int world_size = 2;
  /// How long a rank waits for the others, in the rendezvous and in each collective.
  std::chrono::milliseconds timeout{20000};
};

/// What one rank does. It runs in a thread of its own.
using RankFn = std::function<void(int rank, const c10::intrusive_ptr<c10d::ProcessGroup>& group)>;

/// Runs `fn` once per rank, each in a thread of this process, over gloo on the loopback device and
/// an in-process store. Returns when all ranks have ended. A rank that throws leaves its group at
/// once, so the others see a closed connection instead of waiting for the timeout. The ranks share
/// the process: its CPU generator, its memory budget and its cores (see below).
/// Callable from any thread; calls may overlap. Does not synchronise a device.
/// @throws the exception that was thrown first, after all threads have ended; c10::ValueError if
/// the world size or the timeout is not positive or `fn` is empty; c10::NotImplementedError if
/// brimful was built without gloo
BRIMFUL_API void run_ranks(const RanksOptions& options, const RankFn& fn);

/// What one rank does on its device, which is its thread's current one.
using DeviceRankFn = std::function<void(int rank, c10::Device device,
                                        const c10::intrusive_ptr<c10d::ProcessGroup>& group)>;

/// As above, with one rank per device: data parallelism in one process, in which every rank has a
/// replica and a batch of its own and none waits for a GIL. The group is gloo for CPU tensors and,
/// where the devices are CUDA ones, NCCL for CUDA tensors. The CPU may be named several times, one
/// rank each; a CUDA device once.
///   brimful::run_ranks({{at::kCUDA, 0}, {at::kCUDA, 1}}, [&](int rank, auto device, auto& group) {...});
/// On CUDA devices TORCH_NCCL_ASYNC_ERROR_HANDLING becomes 2 where it is not set, as by init_from_env.
/// Every rank's thread runs CPU operators with a team of at::get_num_threads() threads of its own;
/// call at::set_num_threads(cores / ranks) first where the ranks compute on the CPU.
/// @throws as above; c10::ValueError if there is no device, one is neither CPU nor CUDA or is not
/// here, CPU and CUDA are mixed, or a CUDA device is named twice
BRIMFUL_API void run_ranks(const std::vector<c10::Device>& devices, const DeviceRankFn& fn,
                           std::chrono::milliseconds timeout = std::chrono::minutes(30));

}  // namespace brimful
