#pragma once
#include <brimful/reducer/reducer.h>
#include <brimful/step/participant.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "reducer/bucket_set.h"
#include "reducer/group_link.h"
#include "reducer/hook_chain.h"
#include "reducer/plan_tuner.h"
#include "reducer/stopwatch.h"
#include "reducer/turns.h"
#include "reducer/updates.h"

namespace brimful {

/// Of gradients, on their way.
struct Scales {
  double gradients = 1;  ///< into a bucket that is sent as it is
  double sparse = 1;     ///< of sparse gradients
  double wire = 1;       ///< into the reduction dtype
  double hook = 1;       ///< of what a communication hook returned
};

/// Whose the backward is: of no step, of a plain loop's, of a StepGroup's.
enum class Mode : uint8_t { idle, plain, managed };

/// A step's attempt, and the backward that runs in it.
struct AttemptState {
  std::mutex mutex;  ///< hooks run on one autograd thread per device
  int64_t step = 0;
  Mode mode = Mode::idle;
  bool launching = false;     ///< buckets may be launched in the backward that runs
  bool completing = false;    ///< backward is over, what it did not bring is filled in
  bool plain = false;         ///< the step is one of a plain loop
  bool uneven = false;        ///< ranks may be without data
  int64_t generation = 0;     ///< of that backward
  std::vector<int64_t> seen;  ///< by parameter: the generation in which its gradient last came
  std::vector<uint8_t> used;  ///< by parameter: had a gradient when its bucket was filled
  std::vector<int64_t> with_history;  ///< parameters whose gradient has a graph of its own
  std::atomic<int64_t> next{0};       ///< buckets that were launched
  Scales scales;
  Announcement outgoing;  ///< with the last bucket
  int buffer_source = 0;
  ParticipantAttempt* before = nullptr;
  ParticipantAttempt* after = nullptr;
};

/// Of gradients that come again.
struct LateGradients {
  bool came = false;         ///< a gradient came after its bucket was launched
  int graph_task = -1;       ///< of the backward that a step runs
  bool reentrant = false;    ///< a gradient came in another graph task: it may come again
  bool launch_late = false;  ///< learned from that: all buckets are launched after backward
};

using NodePtr =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

/// What an engine works on, and its plain loop with it.
struct EngineState {
  explicit EngineState(Group group) : link(std::move(group)) {}

  GroupLink link;
  BucketSet layout;
  HookChain hooks{link};
  PlanTuner tuner{link};
  Turns turns{link};
  AttemptState attempt;
  LateGradients late;
  Stopwatch watch;
  std::vector<NodePtr> accumulators;  ///< of the parameters: autograd holds them weakly
  std::optional<Updates> updates;     ///< where there are other ranks
  Reducer::Counters counters;

  void begin_times() {
    watch.begin_step();
    turns.begin_times();
  }
};

}  // namespace brimful
