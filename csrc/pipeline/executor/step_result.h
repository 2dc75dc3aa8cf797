#pragma once
#include <brimful/pipeline/last_failure.h>
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

struct StepResult {
  std::optional<ActionFailure> failure;
  std::vector<PieceLoss> losses;               ///< by microbatch, without a graph
  std::vector<Value> outputs;                  ///< by microbatch, of inference
  bool peer_failed = false;                    ///< another process's step has; it reports what
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
  std::vector<std::string> refusals;  ///< by stage: why it could not be recomputed; empty: it could
  int64_t begin_ns = 0;
  int64_t end_ns = 0;
};

}  // namespace brimful::pipeline
