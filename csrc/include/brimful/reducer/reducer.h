#pragma once
#include <brimful/export.h>
#include <brimful/reducer/plain_loop.h>
#include <brimful/reducer/reducer_options.h>
#include <brimful/reducer/step_times.h>
#include <brimful/step/participant.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace c10d {
class CommHookInterface;  // <torch/csrc/distributed/c10d/comm.hpp>
class ProcessGroup;       // <torch/csrc/distributed/c10d/ProcessGroup.hpp>
}  // namespace c10d

namespace brimful {

/// What a rank brings to a new group.
struct RegroupOptions {
  int64_t progress = 0;  ///< steps that its parameters have taken
  bool whole =
      true;  ///< its parameters are those of `progress` steps, and not of a step that was broken off
  bool synchronise =
      false;  ///< give all ranks the parameters and buffers of rank `source` there and then
};
/// What the ranks of a new group agreed on.
struct Regrouped {
  int source =
      -1;  ///< the lowest whole rank of those that are furthest; -1: none of these is whole
  std::vector<int64_t> progress;  ///< by rank
  std::vector<uint8_t> whole;     ///< by rank
};

/// Sums gradients over the ranks of a process group in buckets that are launched during backward. One collective a bucket
/// and none beside: verdicts, losses, weights and buffers ride in the last bucket. Driven by a step (the Participant
/// interface), or by itself in a plain loop (loop()). Not thread-safe, but hooks may run on any autograd thread.
class BRIMFUL_API Reducer final : public Participant {
 public:
  /// A collective: all ranks construct at the same time. Of a parameter that an earlier reducer has, the new one takes
  /// over; the earlier one throws c10::Error wherever it would begin a step.
  /// @throws PlanMismatch on every rank if their models differ; c10::ValueError if no parameter needs a gradient or
  /// the group is null
  static std::shared_ptr<Reducer> create(std::vector<at::Tensor> parameters,
                                         std::vector<at::Tensor> buffers,
                                         const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                         const ReducerOptions& options = {});
  /// Goes on with another group, for who holds this reducer too: after a rank died, or for one that joins. A collective of
  /// the new group's ranks, which may make a reducer and regroup it at once where they join. Buffers and hooks are new,
  /// since works of the old group may still write into its buffers; the old group is aborted. Kept are options, the
  /// bucket plan of `source` once it is learned, counters, the step's number (the largest of all ranks') and gradients.
  /// Between steps; not thread-safe.
  /// @throws PlanMismatch on every rank if their models differ; RankFailed if a rank of the new group fails meanwhile;
  /// c10::ValueError within a step, and with a communication hook, which may hold the old group. After any of
  /// these the reducer has the old group still, and may regroup again.
  Regrouped regroup(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                    const RegroupOptions& options = {});
  /// The group broke: no step is possible until it regroups. Not so where a rank has only failed a step.
  bool is_broken() const;
  /// Every rank's bytes, by rank; all ranks give the same number. A collective.
  /// @throws RankFailed if the group broke
  friend BRIMFUL_API std::vector<std::vector<uint8_t>> gather_bytes(
      Reducer& reducer, const std::vector<uint8_t>& own);
  /// Waits until a device has made the sums of all steps so far: before what they gave is saved. Nothing on the CPU, whose
  /// steps wait themselves. Between steps.
  /// @throws RankFailed if those of a step have failed: its update is not known
  friend BRIMFUL_API void wait_for_sums(Reducer& reducer);
  /// The same for those that the device has come to: waits for nothing. Before an optimizer's step.
  friend BRIMFUL_API void require_sums(Reducer& reducer);
  ~Reducer() override;
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  PlainLoop& loop();
  const PlainLoop& loop() const;
  /// The module has another tensor for a buffer now, which agrees from the next step on in the place of `before`. False if
  /// its shape, dtype or device is another: then it stays out.
  bool replace_buffer(const at::Tensor& before, const at::Tensor& now);
  /// The tensors of rank `source` on every rank. A collective.
  /// @throws RankFailed if the group broke
  void broadcast(const std::vector<at::Tensor>& tensors, int source);

  /// Counted since construction, for tests and reports.
  struct Counters {
    int64_t steps = 0;
    int64_t launches = 0;
    int64_t host_waits = 0;
    int64_t exchanges = 0;
    int64_t host_exchanges = 0;  ///< of records, between hosts
    int64_t regroups = 0;
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

  /// Of the last steps, oldest first (at most 64); does not synchronise. Between steps.
  std::vector<StepTimes> times() const;

  /// Buckets of this step so far, and in all.
  int64_t launched() const;
  int64_t buckets() const;

  // Participant.
  int rank() const override;
  int world_size() const override;
  int64_t step() const override;
  const std::vector<at::Tensor>& parameters() const override;
  const FailureBoard& board() const override;
  std::vector<ControlRecord> exchange(const ControlRecord& record) override;
  std::vector<at::Tensor> gather(const at::Tensor& own) override;
  void sum(at::Tensor& tensor) override;
  ParticipantAttempt& attempt() override;

 private:
  struct State;
  explicit Reducer(std::shared_ptr<State> state);
  void replace(std::shared_ptr<State> next);
  bool follow_group() override;
  void follow();

  std::shared_ptr<State> s_;
  std::weak_ptr<Reducer> self_;
};

/// In a plain loop, before each forward and to begin a scope (PlainLoop has both), among the members that the group has now:
/// torch 2.15 changes them in place (Participant::follow_group()). Whoever has joined makes a reducer meanwhile, which keeps
/// its parameters to itself (`synchronise_at_start`: false). The bucket plan is learned anew, and a communication hook stays.
BRIMFUL_API void prepare_forward(Reducer& reducer);
BRIMFUL_API void begin_scope(Reducer& reducer);

}  // namespace brimful
