#pragma once
#include <brimful/export.h>
#include <brimful/sizer/batch_norm.h>
#include <brimful/sizer/batch_sizer_options.h>
#include <brimful/sizer/pairs.h>
#include <brimful/sizer/plan.h>
#include <brimful/sizer/split.h>
#include <brimful/sizer/step_input.h>
#include <brimful/step/oom.h>
#include <brimful/step/report.h>
#include <brimful/step/step.h>
#include <brimful/step/transaction.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace brimful {

template <typename Loader>
class Batches;
namespace detail {
class SizerLoop;
}

/// Runs the batch that was asked for in pieces that fit. The gradient is the exact weighted mean over all ranks; a step
/// that ran out of memory is repeated with a finer split from the same buffers and RNG state. One call at a time: a step
/// inside a step, or a call while another thread is in one, throws c10::ValueError and changes nothing.
class BRIMFUL_API BatchSizer {
 public:
  /// @throws c10::ValueError for bad options, or parameters on several devices
  BatchSizer(StepGroup group, Transaction transaction, BatchSizerOptions options = {});
  ~BatchSizer();
  BatchSizer(BatchSizer&&) noexcept;
  /// For one wrapped module, such as a DistributedDataParallel; `options.device` is that of its parameters.
  template <typename Model>
  requires requires(Model& model) {
    model.reducer()->parameters();
    model.module()->buffers();
  }
  explicit BatchSizer(Model& model, BatchSizerOptions options = {});

  /// Fills the gradients of one step, and returns when all ranks agree on how it ended.
  /// @throws the error of this rank's own work, RankFailed for another rank's (RankOutOfMemory if it could not split
  /// further), BatchTooLarge if no split fits here, PlanMismatch if the ranks loaded different states, or do not agree on
  /// `accumulate`, c10::ValueError on all ranks if no row of any counts; parameters, buffers, RNG, the scaler and gradients
  /// to add to are then as before the call.
  /// Waits once for the device.
  Outcome step(const StepInput& input, const PieceWork& work);
  /// The same for a batch that slice_rows() can split, or an empty optional of one where this rank has no data.
  /// `loss_fn(piece)` returns the mean loss, or a PieceLoss.
  template <typename Batch, typename LossFn>
  Outcome step(const Batch& batch, const LossFn& loss_fn, StepOptions options = {});
  /// A step whose loss is over pairs of rows of all ranks: embeddings of all pieces without a graph, gathered; the loss and
  /// its gradients once; then the pieces again, with their random numbers, and backward from these gradients. The gradient is
  /// that of the unsplit batch. Its collectives come before those of the buckets: all ranks call it in the same step. Not
  /// in lockstep; `predict` chooses no pieces for it.
  /// @throws as step(); c10::ValueError where `embed` or `loss` are not what PairWork says: the first step checks that
  Outcome step_pairs(const StepInput& input, const PairWork& work);
  /// `embed_fn(piece)` returns a tensor or a structure of tensors, rows first; `pair_loss(towers)`, or `pair_loss(towers,
  /// own_rows)`, a scalar or a structure of them.
  template <typename Batch, typename EmbedFn, typename PairLoss>
  Outcome step_pairs(const Batch& batch, const EmbedFn& embed_fn, const PairLoss& pair_loss,
                     PairOptions options = {});
  /// Pieces and peak that `predict` would choose; runs a few rows forward and backward twice where it has not seen a batch
  /// of this kind, and leaves buffers and RNG as they were. Concerns this rank only.
  /// @throws c10::ValueError for a bad batch; nothing where the memory follows no law that it knows
  std::optional<Plan> plan(const StepInput& input, const PieceWork& work);
  template <typename Batch, typename LossFn>
  std::optional<Plan> plan(const Batch& batch, const LossFn& loss_fn);
  /// True if the pieces of a step are chosen by a forecast now.
  bool predicts() const;
  template <typename Batch>
  static StepInput input_of(const Batch& batch) {
    StepInput input;
    try {
      input.rows = rows_of(batch);
    } catch (...) {
      input.error = std::current_exception();
    }
    return input;
  }
  /// `for (auto& batch : sizer.batches(loader))`: optional batches, and an end that comes on all ranks together. A body may
  /// make several steps, on all ranks alike, and contain another loop.
  template <typename Loader>
  Batches<Loader> batches(Loader& loader);

  /// Starts a loop over data of which each rank may have another amount: one exchange. Returns false if no rank has any.
  bool begin_loop(Next next, const StepInput& first);
  /// Says, before step(), what this rank will bring to the step after it.
  void announce_next(Next next, const StepInput& next_input);
  /// Informs the other ranks that this one failed between two steps; they raise in their next one.
  void announce_failure(FailureKind kind, const std::string& text);
  /// The same, if they come to another step; where they cannot be reached, the log says so.
  void report_failure(FailureKind kind, const std::string& text);

  /// Calls `step`, an optimizer's. An error in it, which no step can undo, is sent to the other ranks: they raise in their
  /// next step, and this one throws HalfStepError with its text. RankFailed and HalfStepError pass as they are.
  ///   sizer.optimizer_step([&] { optimizer.step(); });
  void optimizer_step(const std::function<void()>& step);
  /// What it does about an error with this text.
  [[noreturn]] void fail_optimizer(const std::string& text);

  /// What this sizer has seen on this rank so far. Not while a step runs.
  Report report() const;

  /// Grows and shrinks with evidence; to be kept in a checkpoint.
  std::map<std::string, double> state() const;
  void load_state(const std::map<std::string, double>& state);
  /// True if the other ranks are in a step of their own, or come to one without an exchange before it.
  bool expects_step() const;
  /// Of the last step: no rank has another batch, or all stop after it.
  bool at_end() const;
  int64_t steps() const;
  /// Of step(), the ones that failed included.
  int64_t calls() const;
  Transaction& transaction();
  /// The reducers have another group now (Reducer::regroup). On all its ranks: what was agreed with the old one is forgotten,
  /// and sizes that were found are kept.
  /// @throws c10::ValueError if the reducers' groups differ, or a parameter is in none and `local` is not set
  void regrouped();
  int world_size() const;

 private:
  friend class detail::SizerLoop;
  class State;
  class StepOfLoop;

  std::unique_ptr<State> state_;
  detail::SizerLoop* loop_ = nullptr;  ///< the innermost one that is under way
};

}  // namespace brimful

#include <brimful/sizer/any_batch.h>
#include <brimful/sizer/batches.h>
