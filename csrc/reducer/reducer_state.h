#pragma once
#include <brimful/reducer/reducer.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "reducer/agree.h"
#include "reducer/bucket.h"
#include "reducer/gradient_view.h"
#include "reducer/owners.h"
#include "reducer/planner.h"
#include "reducer/stopwatch.h"
#include "reducer/tail.h"
#include "reducer/updates.h"
#include "step/failure_board.h"

namespace brimful {

using NodePtr =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

struct Reducer::State {
  // Fixed at construction.
  Group group;
  c10::intrusive_ptr<c10d::Store> store;  ///< null where the group has none
  std::optional<FailureBoard> board;      ///< in the store
  std::string key;                        ///< prefix in the store, equal on all ranks
  int rank = 0;
  int world_size = 1;
  bool alone = false;  ///< a single rank that takes the short way: nothing to send
  c10::Device device = c10::Device(c10::DeviceType::CPU);  ///< the last bucket's
  std::vector<at::Tensor> parameters;
  std::vector<ParameterInfo> infos;
  std::vector<std::string> names;
  std::optional<c10::ScalarType> wire_dtype;
  bool error_feedback = false;
  double predivide = 1;               ///< plain loop: gradients are divided by this before the sum
  std::vector<NodePtr> accumulators;  ///< autograd holds them weakly
  std::vector<uintptr_t> hook_keys;
  std::unique_ptr<c10d::CommHookInterface> hook;
  std::optional<Tail> tail;
  std::optional<Updates> updates;  ///< where there are other ranks

  // The plan and what is made of it (layout.cpp).
  PlanOptions plan_options;
  BucketPlan plan;
  Arenas arenas;
  std::vector<Slot> slots;
  std::vector<GradientView> views;  ///< by parameter: what p.grad is
  std::vector<Bucket> buckets;
  std::unique_ptr<Planner> planner;     ///< rank 0, while the plan may change
  std::optional<BucketPlan> proposal;   ///< rank 0: offered to the others in this step
  uint32_t proposals = 0;               ///< rank 0: so far
  std::optional<BucketPlan> next_plan;  ///< agreed, taken up when the next step begins
  std::vector<int64_t> arrivals;  ///< parameters in the order of their gradients, for the planner

  // Of the step.
  enum class Mode : uint8_t { idle, plain, managed };
  std::mutex mutex;  ///< hooks run on one autograd thread per device
  Mode mode = Mode::idle;
  bool launching = false;     ///< buckets may leave in the backward that runs
  bool completing = false;    ///< backward is over, what it did not bring is filled in
  bool plain_step = false;    ///< the step is one of a plain loop
  int64_t generation = 0;     ///< of that backward
  std::vector<int64_t> seen;  ///< by parameter: the generation in which its gradient last came
  std::vector<uint8_t> used;  ///< by parameter: had a gradient when its bucket was filled
  std::vector<int64_t> with_history;  ///< parameters whose gradient has a graph of its own
  std::atomic<int64_t> next{0};       ///< buckets that have left
  double scale = 1;         ///< of gradients on their way into a bucket that is sent as it is
  double sparse_scale = 1;  ///< of sparse gradients
  double wire_scale = 1;    ///< of gradients on their way onto the wire
  double hook_scale = 1;    ///< of what a communication hook returned
  c10::intrusive_ptr<c10::ivalue::Future> last_hook;  ///< of the last bucket that went to a hook
  int64_t last_hooked = 0;                            ///< that bucket
  uint64_t hook_began = 0;                            ///< collectives of the group before it
  std::map<int64_t, uint64_t> collectives_of_hook;    ///< by bucket: as many as its hook last made
  std::optional<std::chrono::steady_clock::time_point> hook_deadline;  ///< of a process that ends
  c10::intrusive_ptr<c10d::Work> met;  ///< all ranks are behind their forward
  Announcement outgoing;               ///< with the last bucket
  int buffer_source = 0;
  std::string taken;          ///< a parameter that a later reducer has taken over
  std::exception_ptr broken;  ///< the first error of the process group
  std::chrono::steady_clock::time_point waiting_since;  ///< of the last wait for others; max: none
  std::chrono::steady_clock::time_point required_at;    ///< the group, before the last collective
  bool late = false;         ///< a gradient came after its bucket had left
  int graph_task = -1;       ///< of the backward that a step runs
  bool reentrant = false;    ///< a gradient came in another graph task: it may come again
  bool launch_late = false;  ///< learned from that: all buckets leave after backward
  ParticipantAttempt* before = nullptr;
  ParticipantAttempt* after = nullptr;
  Stopwatch watch;

  // Of a plain loop.
  Announcement said;  ///< of its step
  bool sync = true;
  bool forward_open = false;
  bool backward_due = false;  ///< a forward has ended and no backward of the module has begun
  bool announced = false;  ///< other backwards than those of announced forwards are this rank's own
  bool passed = false;     ///< as backward_due, also where that backward does not synchronise
  bool watched = false;    ///< an output of the forward that ends has a graph
  int64_t unseen =
      0;  ///< forwards since then without one: their outputs cannot say that backward begins
  bool warned = false;  ///< of a backward(inputs=...) of some parameters
  bool in_scope = false;
  int64_t ooms_before = 0;  ///< refused allocations before this backward
  int64_t scope_step = 0;
  bool stands = false;            ///< the last plain backward's sums became gradients
  std::optional<Failure> untold;  ///< failed behind that: told with the next step
  std::exception_ptr own_error;   ///< thrown by the reducer itself in this backward
  bool died = false;              ///< a backward died inside the scope, whose end is to tell
  bool aborted = false;           ///< drained after a failure, not yet waited for
  std::vector<int> active;        ///< ranks that had data in the last step
  bool mean_of_active = false;    ///< gradients are the mean over those
  bool joining = false;           ///< between begin_join() and end_join()
  bool throw_early = false;       ///< a step without all ranks fails
  bool called_off = false;        ///< the open scope has no failure to announce
  bool keep_buffers = false;      ///< the rank whose buffers win had no data

  // Of several reducers of a group (turns.cpp).
  std::shared_ptr<GroupTraffic> traffic;
  uint64_t number = 0;                       ///< among the group's reducers, equal on all ranks
  int64_t begun = 0;                         ///< when its plain backward began, among the group's
  bool opened = false;                       ///< the ranks have agreed to be in this step
  bool closed = false;                       ///< and to be at the end of its backward
  bool ended = false;                        ///< they did not: nothing more leaves
  std::vector<std::vector<uint64_t>> turns;  ///< by rank: what it said then
  int64_t turn = 0;                          ///< when
  std::optional<Exchange> parting;           ///< what this rank said when its step died
  uint64_t parting_number = 0;               ///< and of which reducer
  double agreeing_before_ms = 0;             ///< the group's agreeing_ms when the step began
  double agreeing_ms() const { return traffic->agreeing_ms - agreeing_before_ms; }  ///< of the step
  void begin_times() {
    watch.begin_step();
    agreeing_before_ms = traffic->agreeing_ms;
  }

  int64_t step = 0;
  Counters counters;
  int exceptions = std::uncaught_exceptions();  ///< on their way when the reducer was made

  /// That of another reducer of the group.
  FailureBoard board_of(uint64_t of_number) const;
  /// On it, of a step that died where several reducers take turns.
  static std::string turn_place(int64_t at_turn, int of_rank);
  std::string step_of(const std::vector<uint64_t>& turn_of_rank) const;
  int64_t last() const { return static_cast<int64_t>(buckets.size()) - 1; }
  std::string name_of(int64_t parameter) const;
  /// @throws PlanMismatch if a parameter has another size or dtype than at construction
  void require_unchanged(int64_t parameter, const at::Tensor& gradient) const;

  // layout.cpp
  /// The parameter's place is about to get other values: a gradient that the program kept gets memory of its own.
  void let_go_of(size_t parameter);
  void lay_out(BucketPlan new_plan);
  /// What the bucket's gradients are on this rank: a row; undefined if sparse.
  at::Tensor row_of(const Bucket& bucket) const;
  /// What goes to the process group.
  at::Tensor payload(const Bucket& bucket) const;
  bool is_hooked(int64_t index) const {
    return hook && index != last() && !buckets[index].sparse();
  }
  /// A hook may make further collectives when its first one ends, from the group's thread. No other may come between
  /// them, in an order that differs from rank to rank: the next bucket leaves when the last hook is done. (That of NCCL
  /// is as soon as it has been called: its order is that of the stream.)
  bool hook_done() const { return !last_hook || last_hook->completed(); }

  // plain.cpp
  bool lost_backward() const;
  /// `selected`: what the engine runs; nothing for all.
  bool is_whole(const std::unordered_map<torch::autograd::Node*,
                                         torch::autograd::GraphTask::ExecInfo>& selected);

  // rows.cpp
  /// Of this rank, by sparse bucket.
  std::vector<int64_t> own_rows() const;

  // launch.cpp
  void send(int64_t index);
  uint64_t collectives() const;
  std::exception_ptr error_of_hook(c10::ivalue::Future& result) const;
  c10d::GradBucket hook_bucket(int64_t index) const;

  // peers.cpp
  bool told_broken();
  /// Before a collective: a rank that was away for long asks whether the others have given up. What it then calls nobody
  /// matches, and torch's watchdog ends a process for that.
  /// @throws std::runtime_error if they have, or if the group's backend has found an error
  void require_group(c10::Device of);

  // planning.cpp
  void propose_plan();
  void hear_of_plan(uint32_t number);
};

}  // namespace brimful
