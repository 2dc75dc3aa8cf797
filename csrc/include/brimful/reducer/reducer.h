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
  ~Reducer() override;
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  PlainLoop& loop();
  const PlainLoop& loop() const;
  /// The module has another tensor for a buffer now, which agrees from the next step on in the place of `before`. False if
  /// its shape, dtype or device is another: then it stays out.
  bool replace_buffer(const at::Tensor& before, const at::Tensor& now);
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
  ParticipantAttempt& attempt() override;

 private:
  struct State;
  explicit Reducer(std::unique_ptr<State> state);

  std::unique_ptr<State> s_;
};

}  // namespace brimful
