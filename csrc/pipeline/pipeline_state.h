#pragma once
#include <brimful/pipeline/pipeline.h>
#include <brimful/sizer/batch_norm.h>
#include <brimful/step/kept_gradients.h>

#include "sizer/one_call.h"

namespace brimful::pipeline {

/// A stage's BatchNorms and where they are in the step.
struct StageNorms {
  StageNorms(BatchNormPolicy policy, std::vector<BatchNormModule> modules)
      : norms(policy, std::move(modules)) {}
  BatchNorms norms;
  int64_t next = 0;
  int64_t pieces = 0;  ///< 0: not in a step
};

struct Pipeline::State {
  State(std::vector<Stage> stages, PipelineOptions wanted);

  PipelineOutcome step(int64_t rows, const PipelineWork& work);
  Value forward(int64_t rows, const PipelineWork& work);
  Schedule schedule(int64_t microbatches, bool training) const;

  PipelineOptions options;
  std::vector<at::Tensor> parameters;  ///< that need a gradient, each once
  std::vector<std::shared_ptr<StageNorms>> norms;
  Transaction transaction;
  std::unique_ptr<Executor> executor;
  OneCall calls;
  int64_t microbatch_rows = 0;  ///< that fit; 0: memory has not run out yet
  std::optional<Failure> last_failure;
  // Of the last step that stood, for trace() and to_string().
  Schedule last_schedule;
  StepResult last_result;

 private:
  int64_t microbatches_for(int64_t rows) const;
  StepResult attempt(const Schedule& schedule, const std::vector<int64_t>& split,
                     const PipelineWork& work);
  void stand(StepResult result, double ref, PipelineOutcome& outcome, KeptGradients& kept);
  void discard();
  /// The number of microbatches to go on with.
  int64_t refine(const Failure& failure, int64_t rows, int64_t microbatches, int64_t retries,
                 std::vector<TriedSplit>& tried, int64_t peak_bytes);
  [[noreturn]] void raise(Failure failure);
};

}  // namespace brimful::pipeline
