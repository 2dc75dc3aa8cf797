#pragma once
#include <brimful/export.h>
#include <brimful/pipeline/interrupted.h>
#include <brimful/pipeline/keywords.h>
#include <brimful/pipeline/last_failure.h>
#include <brimful/pipeline/pipeline_options.h>
#include <brimful/pipeline/stage.h>
#include <brimful/pipeline/step_progress.h>
#include <brimful/sizer/split.h>
#include <brimful/step/control_record.h>
#include <brimful/step/kept_batch.h>
#include <brimful/step/outcome.h>
#include <brimful/step/report.h>
#include <brimful/step/step.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace brimful::pipeline {

/// What the caller brings to a step; `input` is called by the first stage's thread, `loss` by the last one's. What `input`
/// and `keywords` return may need a gradient: it goes on to where it came from (`x.grad`, a model in front), in one backward
/// when the step stands. In processes `input` is the first rank's, and keywords get what the rank's own stages give them.
struct PipelineWork {
  std::exception_ptr
      refused;  ///< what is wrong with the batch already, which other processes must be informed of
  bool no_data = false;  ///< this replica has no rows, while others have; on all of its ranks
  /// What the batch, the target and the keywords consist of. A step that changes one of them in place does not find it
  /// changed when it is repeated. Optional.
  std::vector<NamedTensor> reused{};
  /// Before each attempt, by the caller's thread: the rows of each microbatch. Optional.
  std::function<void(const std::vector<int64_t>& split)> begin;
  std::function<Value(int microbatch, int64_t begin, int64_t end)> input;
  std::function<PieceLoss(int microbatch, int64_t begin, int64_t end, const Value& output)> loss;
  /// What each stage's forward may ask for by keyword(); called by the stages' threads, several at once. Optional.
  std::function<Keywords(int microbatch, int64_t begin, int64_t end)> keywords;
  /// What it returns is kept while a rank's thread runs the actions of an attempt; both are called by that thread. Optional.
  std::function<std::shared_ptr<void>()> thread_scope;
};

/// No stage asks for any.
struct NoKeywords {};

/// The device of each of a process's stages, to move modules there before they are made stages: as the schedule places
/// them. `parameters` has each stage's, or none.
/// @throws c10::ValueError as Pipeline does for devices and schedules that do not fit, and if stages on different devices
/// share a parameter
BRIMFUL_API std::vector<c10::Device> stage_devices(
    const PipelineOptions& options, const std::vector<std::vector<at::Tensor>>& parameters);

/// Stages of a model, a thread for each device, and a schedule. The gradient is the exact weighted mean over all rows,
/// however uneven the microbatches are. One call at a time, from any thread, but for progress() and to_string().
class BRIMFUL_API Pipeline {
 public:
  /// @throws c10::ValueError for bad options, or parameters that are not on their stage's device
  Pipeline(std::vector<Stage> stages, PipelineOptions options);
  ~Pipeline();
  Pipeline(Pipeline&&) noexcept;

  /// Adds one step's gradients to those of the stages' parameters. When memory runs out anywhere, all stages stop, what the
  /// step has done is undone (gradients, buffers, RNG), and it is repeated with twice the microbatches. Later steps
  /// begin with as many, and with fewer again when there is room (inference by itself). Where they cannot be smaller stages
  /// are recomputed (PipelineOptions::recompute). Stages of one process
  /// that draw random numbers of one generator take turns; the step in which that is found out is repeated as it was.
  /// @throws what a stage throws, with stage, microbatch, action and shapes in its text, and RankFailed for what another
  /// process's does. Errors of torch and the standard library keep their type; one that is derived from std::logic_error or
  /// std::runtime_error is nested in one of the nearest standard type (std::rethrow_if_nested() has it back); others come
  /// as they are, and last_failure() says where. BatchTooLarge if no number of microbatches fits;
  /// c10::ValueError for an empty batch, or a stage that uses parameters which it does not name. A batch of fewer rows
  /// than microbatches, such as the last one of an epoch, has a row in each of as many as it can fill. Parameters,
  /// gradients, buffers and RNG are then as before the call.
  /// Waits for the devices once, for the loss.
  Outcome step(int64_t rows, const PipelineWork& work);
  /// The same for what slice_rows() can split and value_of() can make a Value of. `loss_fn(output, target)` gets the last
  /// stage's output (a tensor, a vector of tensors, or the Value) and returns the mean loss, or a PieceLoss.
  /// `keywords`, a map by name of what can be split too, are for stages that ask for them (keywords.h). Where rows are not
  /// the first dimension, pass Along{tensor, dim}, and Shared{tensor} for what all microbatches get whole, alone or in
  /// vectors, pairs and tuples, and by name in variants: stages and `loss_fn` get the tensors.
  template <typename Batch, typename Target, typename LossFn, typename Named = NoKeywords>
  Outcome step(const Batch& batch, const Target& target, const LossFn& loss_fn,
               const Named& keywords = {});

  /// A step in which this replica has no rows, while others have: its stages get the others' gradients. On all of its ranks.
  /// @throws as step(); c10::ValueError if no replica has any
  Outcome step_without_data();

  /// Begins a loop over data of which each replica may have another amount: announce_next() and step() until at_end(), on all
  /// ranks. One exchange between the replicas. `rows`: of the first batch, if known. Returns false if no replica has any.
  bool begin_loop(Next next, std::optional<int64_t> rows);
  /// Says, before step(), what this replica will bring to the step after it.
  void announce_next(Next next, std::optional<int64_t> rows);
  /// This rank failed between two steps: the others raise in their next one. Nothing after the last step.
  void report_failure(const std::exception_ptr& error);
  bool at_end() const;        ///< no replica has another batch, or all stop after the last step
  bool expects_step() const;  ///< the other ranks come to a step of a loop
  int64_t steps() const;      ///< that stood

  /// The last stage's outputs, in the order of the rows; microbatches stream through the stages. Without gradients; empty
  /// on processes that do not have that stage; modules are as they are, in training or not. Retries as step().
  Value forward(int64_t rows, const PipelineWork& work);
  template <typename Batch, typename Named = NoKeywords>
  Value forward(const Batch& batch, const Named& keywords = {});

  /// Ends a call that is under way, from any thread: no stage begins another action, and within PipelineOptions::patience
  /// the call throws Interrupted. Parameters, gradients, buffers, RNG and batch are then as before it. Where an action does
  /// not end in that time its stage is abandoned: its late gradients are dropped, and later calls throw c10::Error; what
  /// `work` refers to must then live as long as the action. Nothing without a call, or where it stands already.
  void cancel();
  bool is_usable() const;  ///< false once a stage was abandoned
  /// The last call failed because a group broke: that of the pipeline's ranks, or that of one rank's replicas. Alike on all
  /// ranks that live. Reducers regroup then; without a rank of its own a pipeline cannot go on.
  bool is_broken() const;
  /// Its reducers have other groups now, and its parameters have taken so many steps, which its ranks compare in the next
  /// one. On all ranks of all replicas, between calls.
  void regrouped(int64_t progress = 0);
  Schedule schedule(int64_t microbatches) const;  ///< of a step with so many
  const std::vector<Stage>& stages() const;
  const std::vector<c10::Device>& devices() const;
  int64_t microbatches() const;                              ///< that the next step begins with
  const std::optional<ActionFailure>& last_failure() const;  ///< of the last call that raised
  /// What its steps have been on this process, with the memory of its fullest device; calls of forward() do not count.
  Report report() const;
  /// The last step for Perfetto or chrome://tracing, as JSON: each rank's actions as they were, and as the schedule has
  /// them with the mean times of each stage's actions. Empty before the first step, and without `trace`.
  std::string trace() const;
  /// The same as a picture (SVG): the step as measured, above the schedule as planned, on one axis in milliseconds, with
  /// each rank's idle share. In a process of several its own rank alone is measured.
  std::string trace_svg() const;
  /// What it is doing, from any thread at any time, in a step that hangs too; waits for nothing.
  PipelineProgress progress() const;
  /// A few lines for people: stages, devices, parameters, bytes, shares of time in the last step, and what its backwards
  /// could not split; during a call, what it is doing. From any thread.
  std::string to_string() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace brimful::pipeline

#include <brimful/pipeline/pipeline_batches.h>
