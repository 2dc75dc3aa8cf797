#pragma once
#include <brimful/export.h>
#include <brimful/reducer/reducer_options.h>
#include <brimful/reducer/step_times.h>
#include <brimful/step/participant.h>

#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace c10::ivalue {
struct Future;  // <ATen/core/ivalue.h>
}
namespace c10d {
class CommHookInterface;  // <torch/csrc/distributed/c10d/comm.hpp>
class ProcessGroup;       // <torch/csrc/distributed/c10d/ProcessGroup.hpp>
class Work;               // <torch/csrc/distributed/c10d/Work.hpp>
}  // namespace c10d

namespace brimful {

/// Sums gradients over the ranks of a process group in buckets that leave during backward. One collective a bucket and
/// none beside: verdicts, losses, weights and buffers ride in the last bucket. Driven by a step (the Participant
/// interface), or by itself in a plain loop: then gradients become the mean over ranks, as with torch's DDP, and a
/// failure of another rank is raised from backward(). Not thread-safe, but hooks may run on any autograd thread.
class BRIMFUL_API Reducer final : public Participant,
                                  public ParticipantAttempt,
                                  public std::enable_shared_from_this<Reducer> {
 public:
  /// A collective: all ranks construct at the same time. Of a parameter that an earlier reducer has, the new one takes
  /// over; the earlier one throws c10::Error wherever it would begin a step.
  /// @throws PlanMismatch on every rank if their models differ; c10::ValueError if no parameter needs a gradient or
  /// the group is null
  static std::shared_ptr<Reducer> create(std::vector<at::Tensor> parameters,
                                         std::vector<at::Tensor> buffers,
                                         const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                         const ReducerOptions& options = {});
  ~Reducer() override;
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // In a plain loop (see plain.cpp).
  /// Before the module's forward: settles a step that failed on this rank, so that the other ranks learn of it.
  /// @throws c10::Error if a later reducer has taken over a parameter
  void prepare_forward();
  /// After it, for each output that needs a gradient: its backward is the beginning of the step's backward.
  void watch(const at::Tensor& output);
  void forward_done();
  /// False: gradients only accumulate, as under no_sync(). Read when backward runs.
  void set_sync(bool sync);
  bool sync() const;
  /// Until end_scope() a failure of this rank is announced by end_scope, which knows its text.
  void begin_scope();
  void end_scope_ok();
  void end_scope_failed(FailureKind kind, const std::string& text);
  /// Announces that this rank cannot do its part of the step: launches what it owes, waits at most `patience_ms`.
  void announce_failure(FailureKind kind, const std::string& text, int64_t patience_ms);
  /// True while the other ranks wait, or may come to wait, for a step that this rank has begun.
  bool owes() const;
  /// The module has another tensor for a buffer now, which agrees from the next step on in the place of `before`. False if
  /// its shape, dtype or device is another: then it stays out.
  bool replace_buffer(const at::Tensor& before, const at::Tensor& now);
  /// Uneven data in a plain loop, between begin_join() and end_join(). A rank without more data calls join_step() instead
  /// of its steps: it makes the step's calls, with nothing to add, and leaves its gradients empty, or with
  /// `keep_gradients` gets the others' mean. Returns false once no rank makes steps. `mean_of_active`: gradients are the
  /// mean over the ranks that have data, not over all of them. `throw_early`: ranks ask each other before every forward
  /// (require_data), and raise on all of them as soon as one has left.
  /// @throws RankFailed or RankOutOfMemory if another rank fails its step; c10::Error of require_data
  void begin_join(bool mean_of_active, bool throw_early);
  bool join_step(bool keep_gradients = false);
  void end_join();
  /// Under begin_join() with `throw_early`, before a forward: a collective of a byte. Does nothing otherwise, and under a
  /// sizer, whose ranks need not leave together.
  /// @throws c10::Error on every rank if a rank has left and another has not
  void require_data();
  /// True on all ranks if `own` is on any. A collective.
  bool any_rank(bool own);
  /// All ranks know that the step is not made: the scope that is open has no failure to announce.
  void call_off();
  /// Ranks that had data in the last step, in order; empty before the first one.
  const std::vector<int>& active() const;
  /// The tensors of rank `source` on every rank. A collective.
  void broadcast(const std::vector<at::Tensor>& tensors, int source);

  /// Counted since construction, for tests and reports.
  struct Counters {
    int64_t steps = 0;
    int64_t launches = 0;
    int64_t host_waits = 0;
    int64_t exchanges = 0;
  };
  Counters counters() const;

  /// The plan in use as JSON, a list of parameters for each bucket, for ReducerOptions::plan.
  std::string plan() const;
  /// A line a bucket, and how its sizes were found.
  std::string describe_plan() const;
  /// Gradients go through this hook from now on, one call a bucket; it returns their mean over the ranks (torch's
  /// communication hooks do). Called without the GIL from a thread of autograd. Sparse gradients do not pass it. The same
  /// hook on every rank, before the first backward. A collective: all ranks call it together.
  /// @throws c10::ValueError if there is a hook or a wire_dtype already; PlanMismatch if a rank's `name` differs
  void register_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook, const std::string& name);

  /// Scales the gradients so that their norm over all parameters is at most `max_norm`, and returns the norm before
  /// (0-dim, on the last bucket's device; does not synchronise it). One pass a bucket. `norm_type` > 0 or infinity. Call
  /// it after backward() or a sizer's step; equal on all ranks.
  /// @throws c10::ValueError if an argument is not positive
  at::Tensor clip_grad_norm(double max_norm, double norm_type = 2);
  /// Index of the first parameter whose gradient is not finite; nothing if all are. One pass a bucket; synchronises the
  /// device.
  std::optional<int64_t> nonfinite_gradient() const;
  const std::vector<std::string>& names() const;

  /// Of the last steps, oldest first (at most 64); does not synchronise.
  std::vector<StepTimes> times() const;

  int64_t launched() const;
  int64_t buckets() const;
  void publish_failure(FailureKind kind, const std::string& text);

  // Participant.
  int rank() const override;
  int world_size() const override;
  int64_t step() const override;
  const std::vector<at::Tensor>& parameters() const override;
  const FailureBoard& board() const override;
  std::vector<ControlRecord> exchange(const ControlRecord& record) override;
  ParticipantAttempt& attempt() override { return *this; }

  // ParticipantAttempt.
  void begin(int buffer_source) override;
  void set_order(ParticipantAttempt* before, ParticipantAttempt* after) override;
  void begin_piece(bool last, const at::Tensor& loss) override;
  void advance() override;
  bool early_left() const override;
  Progress progress() const override;
  void launch_early(Fill fill) override;
  void launch_last(Fill fill, const Announcement& said) override;
  Ending finish() override;
  void abandon() override;
  void accept(double scale, bool keep_unused) override;
  void discard() override;

 private:
  struct State;
  explicit Reducer(std::unique_ptr<State> state);
  void add_hooks();
  void remove_hooks();
  void settle_owed();
  void retire(const std::vector<at::Tensor>& taken);
  void require_not_taken() const;
  bool begin_backward_at(const at::Tensor& tensor);
  void take_up_plan();
  void collect_hook_results();
  void on_gradient(int64_t parameter, const at::Tensor& gradient);
  void take(int64_t parameter, const at::Tensor& gradient);
  void on_late_gradient(int64_t parameter);
  void start_backward(bool launching);
  void place(int64_t parameter, const at::Tensor& arrived);
  void place_direct(int64_t parameter, const at::Tensor& arrived);
  void add_again(int64_t parameter, const at::Tensor& gradient);
  void fill(int64_t bucket);
  void exchange_rows();
  void leave_word(const Failure& failure);
  void let_go_of_earlier(int64_t bucket);
  void launch(int64_t bucket);
  void launch_drained(int64_t bucket, Fill fill);
  void launch_until(int64_t end, Fill fill, const Announcement* said);
  void forget_attempt();
  void advance_early();
  void wait_for_buckets();
  void end_attempt();
  [[noreturn]] void throw_broken(int64_t at_step, const std::string& waiting_for,
                                 const std::string& cause);
  void abort_group();
  void wait_for(c10d::Work& work, c10::Device device);
  void wait_for(c10d::Work& work, c10::Device device,
                std::chrono::steady_clock::time_point left_at);
  void wait_for_hook(c10::ivalue::Future& future);
  void wait_for_last_hook();
  void check_last_hook(bool throws);
  void break_chain(std::exception_ptr error);
  std::vector<uint8_t> ask_all(uint8_t own, const std::string& what);
  void require_all(bool has_data);
  void begin_plain_step(Status verdict);
  void meet_behind_forward();
  void join_without_gradients();
  bool begin_plain_backward(std::unique_lock<std::mutex>& lock, bool through_output);
  void end_plain_backward();
  void plain_backward_died() noexcept;
  void end_failed_backward(std::exception_ptr error);
  void announce_unwinding() noexcept;
  void abort_step(FailureKind kind, const std::string& text);
  void settle();
  void require_success(const Ending& ending);
  std::optional<int64_t> shared_with(const std::vector<at::Tensor>& others) const;
  void take_sums();
  std::vector<std::shared_ptr<Reducer>> together();
  void join_backward();
  void open_turn();
  bool close_turn();
  void exchange_turn(uint64_t kind);
  void exchange_in_turn();
  void hear_from(const Reducer& other);
  void all_know();
  void give_up();
  [[noreturn]] void end_turn();
  void abort_turn(FailureKind kind, const std::string& text);
  void settle_turn();
  [[noreturn]] void throw_turn_ended();
  void note_data(const std::vector<ControlRecord>& records);

  std::unique_ptr<State> s_;
};

}  // namespace brimful
