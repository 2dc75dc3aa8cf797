#pragma once
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/call.h"
#include "pipeline/doing.h"
#include "pipeline/executor/executor.h"
#include "pipeline/peer_agreement.h"
#include "pipeline/recomputing.h"
#include "pipeline/replicas.h"
#include "pipeline/report.h"
#include "pipeline/stage_norms.h"
#include "pipeline/tied_weights.h"
#include "step/retry.h"
#include "step/step_engine.h"
#include "step/too_large.h"

namespace brimful::pipeline {

/// Each once.
std::vector<c10::Device> distinct(const std::vector<c10::Device>& devices);

/// Of a step with so many rows, if that is known.
ControlRecord record_of(Next next, std::optional<int64_t> rows);

/// Parameters that need a gradient, each once.
std::vector<at::Tensor> trained_of(const std::vector<Stage>& stages);

/// What a pipeline is made of.
struct Pipeline::State {
  State(std::vector<Stage> stages, PipelineOptions wanted);

  bool begin_loop(const ControlRecord& first);
  void announce_next(const ControlRecord& next);
  void regrouped(int64_t progress);
  Report report() const;
  Schedule schedule(int64_t microbatches, bool training) const;

  /// What fits. A forward alone holds less than a step.
  struct Policies {
    explicit Policies(const std::vector<c10::Device>& devices);
    RetryPolicy& of(bool trains) { return trains ? training : inference; }
    RetryPolicy training;
    RetryPolicy inference;
  };
  class InCall;
  class PipelineStep;

  PipelineOptions options;
  Policies policies{options.devices};
  std::vector<std::shared_ptr<StageNorms>> norms;
  std::unique_ptr<Executor> executor;
  std::unique_ptr<Recomputing> recomputing;
  std::unique_ptr<Replicas> replicas;
  TiedWeights tied;
  PeerAgreement agreement{options, tied};
  std::unique_ptr<StepEngine> engine;
  std::atomic<const char*> doing{kIdle};  ///< for progress()
  std::atomic<bool> cancelled{false};     ///< by cancel()
  std::optional<ActionFailure> last_failure;
  LastStep last;
  bool has_stepped = false;  ///< a call has begun

  StepGroup group_of_step() const;

 private:
  void begin_call();
  /// Where memory has not run out.
  int64_t first_microbatches(bool trains, int64_t rows) const;
  /// Alike on all ranks, as all that were shrunk together remember it.
  Retry retry_of(bool trains, int64_t rows);
  /// For the executor, while a call's actions run.
  void look_for_interrupt();
  void require_usable() const;
  bool may_split() const;
};

}  // namespace brimful::pipeline
