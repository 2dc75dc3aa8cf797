#pragma once
#include <brimful/reducer/reducer.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <utility>

#include "reducer/agree.h"
#include "reducer/bucket.h"
#include "reducer/tail.h"

namespace brimful {

using NodePtr =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

struct Reducer::State {
  // Fixed at construction.
  Group group;
  c10::intrusive_ptr<c10d::Store> store;  ///< words of failures; null where the group has none
  std::string key;                        ///< prefix in the store, equal on all ranks
  int rank = 0;
  int world_size = 1;
  c10::Device device = c10::Device(c10::DeviceType::CPU);  ///< the last bucket's
  std::vector<at::Tensor> parameters;
  std::vector<std::string> names;
  std::string plan;
  std::vector<Slot> slots;
  std::vector<Bucket> buckets;
  std::optional<Tail> tail;
  std::vector<NodePtr> accumulators;  ///< autograd holds them weakly
  std::vector<uintptr_t> hook_keys;

  // Of the step.
  enum class Mode : uint8_t { idle, plain, managed };
  std::mutex mutex;  ///< hooks run on one autograd thread per device
  Mode mode = Mode::idle;
  bool launching = false;        ///< buckets may leave in the backward that runs
  int64_t generation = 0;        ///< of that backward
  std::vector<int64_t> seen;     ///< by parameter: the generation in which its gradient last came
  std::vector<uint8_t> used;     ///< by parameter: had a gradient when its bucket was filled
  std::atomic<int64_t> next{0};  ///< buckets that have left
  double scale = 1;              ///< of gradients on their way into a bucket
  ControlRecord record;
  at::Tensor loss_sum;
  int buffer_source = 0;
  std::exception_ptr broken;                            ///< the first error of the process group
  std::chrono::steady_clock::time_point waiting_since;  ///< of the last wait for other ranks
  bool late = false;         ///< a gradient came after its bucket had left
  int graph_task = -1;       ///< of the backward that a step runs
  bool reentrant = false;    ///< a gradient came in another graph task: it may come again
  bool launch_late = false;  ///< learned from that: all buckets leave after backward
  Participant* before = nullptr;
  Participant* after = nullptr;

  // Of a plain loop.
  bool sync = true;
  bool forward_open = false;
  bool in_scope = false;
  int64_t ooms_before = 0;  ///< refused allocations before this backward
  int64_t scope_step = 0;
  bool stands = false;  ///< the last plain backward's sums became gradients
  std::optional<std::pair<FailureKind, std::string>>
      untold;            ///< failed behind that: told with the next step
  bool died = false;     ///< a backward died inside the scope, whose end is to tell
  bool aborted = false;  ///< drained after a failure, not yet waited for

  int64_t step = 0;
  Counters counters;

  std::string failure_key(int64_t at_step, int of_rank) const;
  int64_t last() const { return static_cast<int64_t>(buckets.size()) - 1; }
};

}  // namespace brimful
