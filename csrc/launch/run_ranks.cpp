#include "launch/gloo_group.h"

#include <brimful/launch/run_ranks.h>
#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace brimful {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

class FirstError {
 public:
  void keep(std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (!error_) {
      error_ = std::move(error);
    }
  }
  void rethrow_if_any() const {
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
};

void run_rank(const RanksOptions& options, const RankFn& fn,
              const c10::intrusive_ptr<c10d::Store>& store, int rank, Group& group) {
  c10::setThreadName("rank " + std::to_string(rank));
  group = launch::make_gloo_group(store, rank, options.world_size, launch::GlooDevice::loopback,
                                  options.timeout);
  fn(rank, group);
}

}  // namespace

void run_ranks(const RanksOptions& options, const RankFn& fn) {
  TORCH_CHECK_VALUE(options.world_size >= 1,
                    "need at least one rank (world_size: ", options.world_size, ")");
  TORCH_CHECK_VALUE(options.timeout.count() > 0,
                    "the timeout must be positive (timeout_ms: ", options.timeout.count(), ")");
  TORCH_CHECK_VALUE(fn != nullptr,
                    "there is nothing to run (fn: empty); pass what each rank shall do");

  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(options.timeout);
  FirstError error;
  // A rank that ended well keeps its group until all have ended: closing it could cut off a slower
  // one.
  std::vector<Group> groups(options.world_size);
  {
    std::vector<std::jthread> threads;
    threads.reserve(options.world_size);
    for (int rank = 0; rank < options.world_size; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          run_rank(options, fn, store, rank, groups[rank]);
        } catch (...) {
          error.keep(std::current_exception());
          groups[rank].reset();
        }
      });
    }
  }
  groups.clear();
  error.rethrow_if_any();
}

}  // namespace brimful
