#include <brimful/launch/run_ranks.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "launch/gloo_group.h"
#include "launch/nccl_group.h"
#include "memory/cuda.h"

namespace brimful {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

/// The ranks' groups and what went wrong first.
class Ranks {
 public:
  explicit Ranks(int world_size) : groups_(world_size) {}

  void join(int rank, const Group& group) {
    const std::lock_guard lock(mutex_);
    groups_[rank] = group;
  }

  /// Closes the rank's connections. NCCL's peers would not notice: theirs are aborted.
  void leave(int rank, std::exception_ptr error) {
    Group own;
    std::vector<Group> all;
    {
      const std::lock_guard lock(mutex_);
      if (!error_) {
        error_ = std::move(error);
      }
      all = groups_;
      own.swap(groups_[rank]);
    }
    for (const auto& group : all) {
      if (group) {
        group->abort();
      }
    }
  }

  /// A rank that ended well keeps its group until here: closing it could cut off a slower one.
  void end() {
    groups_.clear();
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

 private:
  std::mutex mutex_;
  std::vector<Group> groups_;
  std::exception_ptr error_;
};

void run(const std::vector<c10::Device>& devices, const DeviceRankFn& fn,
         std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() > 0,
                    "the timeout must be positive (timeout_ms: ", timeout.count(), ")");
  const int world_size = static_cast<int>(devices.size());
  if (devices.front().is_cuda()) {
    launch::keep_process_on_nccl_errors();
  }
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(timeout);
  Ranks ranks(world_size);
  const auto run_rank = [&](int rank) {
    c10::setThreadName("rank " + std::to_string(rank));
    const auto device = devices[rank];
    const c10::DeviceGuard guard(device);
    const auto group =
        launch::make_gloo_group(store, rank, world_size, launch::GlooDevice::loopback, timeout);
    if (device.is_cuda()) {
      launch::add_nccl(*group, store, rank, world_size, device, timeout);
    }
    ranks.join(rank, group);
    fn(rank, device, group);
  };
  {
    std::vector<std::jthread> threads;
    threads.reserve(world_size);
    for (int rank = 0; rank < world_size; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          run_rank(rank);
        } catch (...) {
          ranks.leave(rank, std::current_exception());
        }
      });
    }
  }
  ranks.end();
}

/// Whether one group can have a rank on each of these. Pure.
void require_one_rank_each(const std::vector<c10::Device>& devices) {
  TORCH_CHECK_VALUE(!devices.empty(), "need at least one rank (devices: none)");
  for (auto device = devices.begin(); device != devices.end(); ++device) {
    TORCH_CHECK_VALUE(device->is_cpu() || device->is_cuda(),
                      "a rank runs on the CPU or on a CUDA device (device: ", *device, ")");
    TORCH_CHECK_VALUE(!device->is_cpu() || device->index() <= 0,
                      "there is one CPU device (device: ", *device,
                      "); use cpu, for several ranks too");
    TORCH_CHECK_VALUE(device->type() == devices.front().type(),
                      "the ranks of one group are all on the CPU or all on CUDA devices (devices: ",
                      devices.front(), ", ", *device, "); run them apart");
    TORCH_CHECK_VALUE(device->is_cpu() || std::find(devices.begin(), device, *device) == device,
                      "NCCL takes one rank per CUDA device (named twice: ", *device, ")");
  }
}

}  // namespace

void run_ranks(const RanksOptions& options, const RankFn& fn) {
  TORCH_CHECK_VALUE(options.world_size >= 1,
                    "need at least one rank (world_size: ", options.world_size, ")");
  TORCH_CHECK_VALUE(fn != nullptr,
                    "there is nothing to run (fn: empty); pass what each rank shall do");
  const std::vector<c10::Device> devices(options.world_size, c10::Device(c10::DeviceType::CPU));
  const auto without_device = [&](int rank, c10::Device, const Group& group) { fn(rank, group); };
  run(devices, without_device, options.timeout);
}

void run_ranks(const std::vector<c10::Device>& devices, const DeviceRankFn& fn,
               std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(fn != nullptr,
                    "there is nothing to run (fn: empty); pass what each rank shall do");
  require_one_rank_each(devices);
  auto here = devices;
  for (auto& device : here) {
    if (device.is_cuda()) {
      device = c10::Device(c10::DeviceType::CUDA, memory::checked_cuda_index(device));
    }
  }
  require_one_rank_each(here);  // "cuda" has an index now
  run(here, fn, timeout);
}

}  // namespace brimful
