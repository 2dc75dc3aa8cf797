#pragma once
#include <brimful/step/kept_batch.h>

#include <algorithm>
#include <atomic>

#include "pipeline/call.h"
#include "pipeline/executor/executor.h"
#include "pipeline/recomputing.h"
#include "pipeline/replicas.h"
#include "pipeline/report.h"
#include "pipeline/tied_weights.h"
#include "pipeline/transport/peers.h"
#include "step/one_call.h"
#include "step/retry.h"
#include "step/step_recorder.h"
#include "step/too_large.h"

namespace brimful::pipeline {

struct Pipeline::State {
  State(std::vector<Stage> stages, PipelineOptions wanted);

  Outcome step(int64_t rows, const PipelineWork& work);
  Value forward(int64_t rows, const PipelineWork& work);
  void regrouped(int64_t progress);
  bool is_broken() const { return agreed_.broken; }
  Report report() const;
  Schedule schedule(int64_t microbatches, bool training) const;

  /// What fits. A forward alone holds less than a step.
  struct Policies {
    explicit Policies(const std::vector<c10::Device>& devices);
    RetryPolicy& of(bool trains) { return trains ? training : inference; }
    RetryPolicy training;
    RetryPolicy inference;
  };

  PipelineOptions options;
  Policies policies{options.devices};
  std::vector<std::shared_ptr<StageNorms>> norms;
  Transaction transaction;
  KeptBatch batch;  ///< of the call that is under way
  std::unique_ptr<Executor> executor;
  std::unique_ptr<Recomputing> recomputing;
  std::unique_ptr<Replicas> replicas;
  TiedWeights tied;
  OneCall calls{"pipeline"};
  std::atomic<const char*> doing{kIdle};  ///< for progress()
  std::atomic<bool> cancelled{false};     ///< by cancel()
  std::optional<ActionFailure> last_failure;
  StepRecorder recorder;
  LastStep last;

 private:
  StepGroup group_of_step() const;
  bool may_split() const;

  // attempt.cpp
  /// Before the first attempt: what all ranks must know alike.
  void begin(Call& call);
  /// For the executor, while a call's actions run.
  void look_for_interrupt();
  void meet(Call& call);
  /// Links between the ranks, beside their group.
  void connect(Call& call, int64_t name);
  void read_meeting(Call& call, const PeerVerdict& all);
  void find_ref(Call& call);
  StepResult run(Call& call);
  StepResult run_actions(const Call& call, std::exception_ptr refused);
  /// With the other ranks, and learns whether a group broke on one of them.
  PeerVerdict agree(const PeerVerdict& own);
  /// Ends an attempt on all ranks of all replicas, and returns how it has ended.
  PeerVerdict close(Call& call, StepResult& result);
  PeerVerdict own_verdict(const Call& call, const StepResult& result) const;
  void read_replicas(Call& call, StepResult& result, const std::vector<ControlRecord>& records,
                     PeerVerdict& verdict) const;
  /// Of what failed in none of the actions.
  ActionFailure failure_outside(std::exception_ptr error) const;
  /// The attempt's failure is what `work` throws, unless there was one before.
  template <typename Work>
  void noting(StepResult& result, const Work& work) const {
    try {
      work();
    } catch (...) {
      if (!result.failure) {
        result.failure = failure_outside(std::current_exception());
      }
    }
  }

  // retries.cpp
  /// Where memory has not run out.
  int64_t first_microbatches(bool trains, int64_t rows) const;
  /// Alike on all ranks, as all that were shrunk together remember it.
  Retry retry_of(bool trains, int64_t rows);
  /// Fewer microbatches, where this rank has the memory.
  void choose_microbatches(Call& call);
  c10::Device device_of(const ActionFailure& failure) const;
  std::string name_of(const Call& call) const;  ///< in texts
  AttemptNote note_of(const Call& call, const StepResult& result, const PeerVerdict& verdict,
                      const RetryPolicy::Bytes& peaks) const;
  Ended ended_by(Call& call, const StepResult& result, const PeerVerdict& verdict);
  Ended attempt(Call& call, PeerVerdict& verdict, StepResult& standing);
  StepResult run_until_it_stands(Call& call, PeerVerdict& verdict);

  // settle.cpp
  /// Makes the gradients of an attempt that stands the step's.
  void settle(Call& call, const PeerVerdict& verdict, const StepResult& result);
  /// To the caller's tensors that need them.
  void return_gradients(const StepResult& result, double scale) const;
  /// Where ranks have more to exchange than a verdict they learn what failed in it. Gradients that have overflowed on one
  /// rank make another rank's not finite: the scalers of all skip the step.
  void post_settled(const Call& call, const PeerVerdict& verdict, std::exception_ptr failed);

  // pipeline.cpp
  void capture(Call& call);
  void keep(const PipelineWork& work);
  void stand(Call& call, StepResult result, const PeerVerdict& verdict, Outcome& outcome);
  /// Undoes the call; other ranks do not learn of it from this one.
  [[noreturn]] void give_up(Call& call, const StepResult& result);
  void require_usable() const;
  Shortfall shortfall_of(const Call& call, const ActionFailure& failure) const;
  [[noreturn]] void raise(Call& call, StepResult& result, const PeerVerdict& verdict);
  /// Gradients, buffers and random numbers are as before the attempt.
  void undo(Call& call);
  /// What `work` throws fails the call; where other ranks must learn of it, not at once.
  template <typename Work>
  void refuse_if_thrown(Call& call, const Work& work) {
    try {
      work();
    } catch (...) {
      if (!options.peers && call.group.world_size() == 1) {
        throw;
      }
      call.refused = std::current_exception();
    }
  }

  Agreement agreed_;
  bool has_stepped_ = false;  ///< a call has begun
  int64_t steps_ = 0;         ///< that stood
  double last_total_ = 0;     ///< weight of the last step that stood, over all replicas
};

}  // namespace brimful::pipeline
