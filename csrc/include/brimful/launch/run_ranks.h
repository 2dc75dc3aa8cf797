#pragma once
#include <brimful/export.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>

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
/// the process: its CPU generator, its memory budget and its intra-op threads.
/// Callable from any thread; calls may overlap. Does not synchronise a device.
/// @throws the exception that was thrown first, after all threads have ended; c10::ValueError if
/// the world size or the timeout is not positive or `fn` is empty; c10::NotImplementedError if
/// brimful was built without gloo
BRIMFUL_API void run_ranks(const RanksOptions& options, const RankFn& fn);

}  // namespace brimful
