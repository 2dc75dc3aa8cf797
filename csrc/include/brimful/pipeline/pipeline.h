#pragma once
#include <brimful/export.h>
#include <brimful/pipeline/executor.h>
#include <brimful/pipeline/outcome.h>
#include <brimful/pipeline/schedule.h>
#include <brimful/pipeline/stage.h>
#include <brimful/sizer/batch_norm.h>
#include <brimful/sizer/split.h>
#include <brimful/step/transaction.h>

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace brimful {
class GradScaler;
}

namespace brimful::pipeline {

struct PipelineOptions {
  /// By rank: as many as there are stages, or fewer where the schedule gives a rank several. Empty: the CPU, once a stage.
  std::vector<c10::Device> devices;
  /// The processes of this pipeline: each has the stages of one rank, and calls step() and forward() with the same batch.
  /// They agree after each attempt: what fails on one is repeated, or raised, on all.
  std::shared_ptr<Peers> peers;
  std::string schedule = "1f1b";  ///< a name that make_schedule() knows
  /// In place of `schedule`: one of your own for a number of microbatches, which must be the one asked for.
  std::function<Schedule(int microbatches)> schedule_for;
  int64_t microbatches = 1;  ///< to begin with; doubled whenever memory runs out
  int64_t max_retries = 8;
  int threads_per_rank = 0;  ///< of CPU operators in a stage; 0: the caller's, shared out
  std::chrono::microseconds spin{30};
  bool trace = true;
  BatchNormPolicy batch_norm = BatchNormPolicy::warn;
  GradScaler* scaler = nullptr;  ///< as in BatchSizerOptions; outlives the pipeline
  std::vector<Transaction::Keeper> keepers;
  std::function<void(int rank, int index, const Action& action)> before_action;
  std::function<std::exception_ptr(std::exception_ptr)> translate;
  std::function<std::shared_ptr<void>()> thread_scope;
};

/// What the caller brings to a step; `input` is called by the first stage's thread, `loss` by the last one's.
struct PipelineWork {
  /// Before each attempt, by the caller's thread: the rows of each microbatch. Optional.
  std::function<void(const std::vector<int64_t>& split)> begin;
  std::function<Value(int microbatch, int64_t begin, int64_t end)> input;
  std::function<PieceLoss(int microbatch, int64_t begin, int64_t end, const Value& output)> loss;
};

/// Stages of a model, a thread for each device, and a schedule. The gradient is the exact weighted mean over all rows,
/// however uneven the microbatches are. One call at a time; from any thread.
class BRIMFUL_API Pipeline {
 public:
  /// @throws c10::ValueError for bad options, or parameters that are not on their stage's device
  Pipeline(std::vector<Stage> stages, PipelineOptions options);
  ~Pipeline();
  Pipeline(Pipeline&&) noexcept;

  /// Adds one step's gradients to those of the stages' parameters. When memory runs out anywhere, all stages stop, what the
  /// step has done is undone (gradients, buffers, RNG), and it is repeated with twice the microbatches.
  /// @throws what a stage throws, of the same type, with stage, microbatch, action and shapes in its words where the type
  /// allows, and RankFailed for what another process's does; BatchTooLarge if no number of microbatches fits; c10::ValueError for fewer rows than microbatches, or a stage
  /// that uses parameters which it does not name. Parameters,
  /// gradients, buffers and RNG are then as before the call.
  /// Waits for the devices once, for the loss.
  PipelineOutcome step(int64_t rows, const PipelineWork& work);
  /// The same for what slice_rows() can split and value_of() can make a Value of. `loss_fn(output, target)` gets the last
  /// stage's output (a tensor, a vector of tensors, or the Value) and returns the mean loss, or a PieceLoss.
  template <typename Batch, typename Target, typename LossFn>
  PipelineOutcome step(const Batch& batch, const Target& target, const LossFn& loss_fn);

  /// The last stage's outputs, in the order of the rows; microbatches stream through the stages. Without gradients; empty
  /// on processes that do not have that stage;
  /// modules are as they are, in training or not. Retries as step().
  Value forward(int64_t rows, const PipelineWork& work);
  template <typename Batch>
  Value forward(const Batch& batch);

  /// The schedule of a step with so many microbatches.
  Schedule schedule(int64_t microbatches) const;
  const std::vector<Stage>& stages() const;
  const std::vector<c10::Device>& devices() const;
  /// That the next step begins with.
  int64_t microbatches() const;
  /// Of the last call that raised.
  const std::optional<Failure>& last_failure() const;
  /// The last step for Perfetto or chrome://tracing, as JSON: each rank's actions as they were, and as the schedule has
  /// them with the mean times of each stage's actions. Empty before the first step, and without `trace`.
  std::string trace() const;
  /// A few lines for people: stages, devices, parameters, bytes, and shares of time in the last step.
  std::string to_string() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

namespace detail {
template <typename LossFn, typename Target>
PieceLoss loss_of(const LossFn& loss_fn, const Value& output, const Target& target, double rows) {
  const auto as_piece = [&](auto result) -> PieceLoss {
    if constexpr (std::is_same_v<decltype(result), PieceLoss>) {
      return result;
    } else {
      return {result, rows};
    }
  };
  if constexpr (std::is_invocable_v<const LossFn&, at::Tensor, Target>) {
    TORCH_CHECK_TYPE(
        output.tensors.size() == 1,
        "the loss function takes one tensor, but the last stage gives another number (",
        shapes_of(output.tensors), ")");
    return as_piece(loss_fn(output.tensors[0], target));
  } else if constexpr (std::is_invocable_v<const LossFn&, std::vector<at::Tensor>, Target>) {
    return as_piece(loss_fn(output.tensors, target));
  } else {
    return as_piece(loss_fn(output, target));
  }
}
}  // namespace detail

template <typename Batch, typename Target, typename LossFn>
PipelineOutcome Pipeline::step(const Batch& batch, const Target& target, const LossFn& loss_fn) {
  PipelineWork work;
  work.input = [&](int, int64_t begin, int64_t end) {
    return value_of(slice_rows(batch, begin, end));
  };
  work.loss = [&](int, int64_t begin, int64_t end, const Value& output) {
    return detail::loss_of(loss_fn, output, slice_rows(target, begin, end),
                           static_cast<double>(end - begin));
  };
  const auto rows = rows_of(batch);
  TORCH_CHECK_VALUE(rows_of(target) == rows, "batch and target disagree in size (rows: ", rows,
                    " and ", rows_of(target), "); give both the same number");
  return step(rows, work);
}

template <typename Batch>
Value Pipeline::forward(const Batch& batch) {
  PipelineWork work;
  work.input = [&](int, int64_t begin, int64_t end) {
    return value_of(slice_rows(batch, begin, end));
  };
  return forward(rows_of(batch), work);
}

}  // namespace brimful::pipeline
