#pragma once
#include <brimful/export.h>
#include <brimful/pipeline/schedule.h>
#include <brimful/pipeline/value.h>
#include <brimful/step/step.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

namespace brimful::pipeline {

/// What a tensor of the caller's gets from a step.
struct CallerGradient {
  at::Tensor tensor;
  at::Tensor gradient;
};

/// When an action ran, in nanoseconds of the steady clock; `begin_ns` comes after its messages did.
struct ActionTime {
  Action action;
  int64_t wait_ns = 0;
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

/// The first action that failed.
struct Failure {
  int rank = 0;
  int index = 0;  ///< in the rank's order; -1: it was none of the actions
  Action action;
  std::string stage;   ///< its name
  std::string shapes;  ///< of the stage's inputs in this microbatch, as far as they were there
  std::string text;
  bool elsewhere = false;  ///< in another process: no more than the rank and the text is known
  bool out_of_memory = false;
  std::exception_ptr error;  ///< none if out of memory: it would pin the tensors of its frames
};
/// "forward of microbatch 3 in stage 1 (decoder; rank 1, action 5, inputs: [8, 64] Float)"
BRIMFUL_API std::string describe(const Failure& failure);

struct StepResult {
  std::optional<Failure> failure;
  std::vector<PieceLoss> losses;               ///< by microbatch, without a graph
  std::vector<Value> outputs;                  ///< by microbatch, of inference
  bool peer_failed = false;                    ///< another process's step has; it tells what
  std::vector<std::vector<ActionTime>> times;  ///< by rank
  bool cancelled = false;                      ///< by cancel()
  std::exception_ptr interrupted;              ///< what ExecutorOptions::interrupt threw
  bool abandoned = false;                      ///< an action is still under way
  /// Stages drew random numbers beside each other, of one generator. It is as before the run, which must be repeated: from
  /// then on they take turns.
  bool drew_together = false;
  /// Of inputs of the first stage and of keywords that need one, as `StepWork` gave them; a tensor once for each stage.
  std::vector<CallerGradient> caller_gradients;
  std::vector<int> peak_live;  ///< by stage: microbatches whose graph was held at once
  /// By stage, with `trace`: the most bytes that forwards had left for their backwards at once. On a CUDA device what
  /// others allocate there meanwhile counts too.
  std::vector<int64_t> peak_live_bytes;
  std::vector<std::string>
      split_notes;  ///< by stage: why its backward is not split, where the schedule does
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

/// Where a rank of this process is in the step that is under way.
struct RankProgress {
  int rank = 0;
  int64_t done = 0;     ///< actions
  int64_t actions = 0;  ///< of its order
  Action action;        ///< the one after those done, in which it is; `done` == `actions`: none
  bool waits = false;   ///< for the action's message
  double seconds = 0;   ///< since the action began; 0 without `trace`
};

/// What a pipeline is doing; see Pipeline::progress().
struct PipelineProgress {
  std::string doing;                ///< "no call is under way", or the part of a call
  std::vector<RankProgress> ranks;  ///< of this process, while a step's actions run
};
/// A line, and one for each rank: "rank 0: action 5 of 16, 0B1 (backward of microbatch 1 in stage 0), for 0.3 s".
BRIMFUL_API std::string to_string(const PipelineProgress& progress);

}  // namespace brimful::pipeline
