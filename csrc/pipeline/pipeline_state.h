#pragma once
#include <brimful/pipeline/pipeline.h>
#include <brimful/sizer/batch_norm.h>
#include <brimful/step/kept_gradients.h>

#include "pipeline/peers.h"
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

/// Each once.
std::vector<c10::Device> distinct(const std::vector<c10::Device>& devices);

/// Parameters that need a gradient, each once.
std::vector<at::Tensor> trained_of(const std::vector<Stage>& stages);

struct Pipeline::State {
  State(std::vector<Stage> stages, PipelineOptions wanted);

  PipelineOutcome step(int64_t rows, const PipelineWork& work);
  Value forward(int64_t rows, const PipelineWork& work);
  Schedule schedule(int64_t microbatches, bool training) const;

  PipelineOptions options;
  /// Whose gradients an attempt makes, and undoes if it fails: none in forward().
  std::vector<at::Tensor> parameters;
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
                     const PipelineWork& work, std::exception_ptr refused);
  /// How the attempt has ended on all ranks.
  PeerVerdict agree(const StepResult& result, int64_t rows);
  void stand(StepResult result, const PeerVerdict& verdict, PipelineOutcome& outcome,
             KeptGradients& kept);
  /// Throws, or returns the failure that is worth another attempt.
  Failure settle(StepResult& result, const PeerVerdict& verdict);
  /// Gradients, buffers and random numbers are as before the attempt.
  void undo();
  /// The number of microbatches to go on with.
  int64_t refine(const Failure& failure, int64_t rows, int64_t microbatches, int64_t retries,
                 std::vector<TriedSplit>& tried, int64_t peak_bytes, bool may_split);
  /// What `work` throws where other processes must learn of it; else it is thrown.
  template <typename Work>
  std::exception_ptr refusal_of(const Work& work) {
    try {
      work();
    } catch (...) {
      if (!options.peers) {
        throw;
      }
      return std::current_exception();
    }
    return nullptr;
  }
  /// What `work` returns; when it throws, the attempt is undone first.
  template <typename Work>
  auto undone_if_thrown(const Work& work) {
    try {
      return work();
    } catch (...) {
      undo();
      throw;
    }
  }
};

}  // namespace brimful::pipeline
