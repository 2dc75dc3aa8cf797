#pragma once
#include <brimful/export.h>
#include <brimful/pipeline/keywords.h>
#include <brimful/pipeline/peers.h>
#include <brimful/pipeline/schedule.h>
#include <brimful/pipeline/stage.h>
#include <brimful/pipeline/step_progress.h>
#include <brimful/pipeline/value.h>
#include <brimful/step/step.h>
#include <c10/core/Device.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/executor/stage_rung.h"
#include "pipeline/executor/step_result.h"

namespace brimful::pipeline {

struct ExecutorOptions {
  std::vector<c10::Device> devices;  ///< by rank: one thread each
  /// The other ranks are other processes, and this one has one device and its own stages. None: all ranks are here.
  std::shared_ptr<Peers> peers;
  int threads_per_rank = 0;  ///< of CPU operators in a stage; 0: the caller's, shared out
  /// How long a rank looks for its next message before it sleeps; none where there are more ranks than cores.
  std::chrono::microseconds spin{100};
  bool trace = true;  ///< note when each action began and ended
  /// Called by the rank's thread before each action (its number in the rank's order); what it throws fails the action.
  std::function<void(int rank, int index, const Action& action)> before_action;
  /// Turns an error of another language into what the core understands; called inside its handler.
  std::function<std::exception_ptr(std::exception_ptr)> translate;
  /// Called by run()'s thread some twenty times a second while the ranks work, and once when they are done. What it throws
  /// ends the run, and is StepResult::interrupted.
  std::function<void()> interrupt;
  /// How long a run that was ended waits for actions that are under way. What still runs then is abandoned.
  std::chrono::milliseconds patience{1000};
  /// What it returns is kept as long as the rank's thread runs, and is destroyed by that thread.
  std::function<std::shared_ptr<void>()> thread_scope;
};

/// What a step's actions do beside the stages' own work; each is called by a stage's thread.
struct StepWork {
  std::function<Value(int microbatch)> input;  ///< of the first stage
  /// Of the last stage's output. Nothing: inference, and outputs are kept.
  std::function<PieceLoss(int microbatch, const Value& output)> loss;
  /// Makes the seed of a microbatch's backward of its share of the loss. Default: that share.
  std::function<at::Tensor(const at::Tensor& share)> seed;
  /// Of a microbatch, for each stage's thread; several may call it at once. Optional.
  std::function<Keywords(int microbatch)> keywords;
  /// Those behind so many have no rows: nothing of theirs runs, and empty messages take the places of theirs.
  int filled = std::numeric_limits<int>::max();
  double ref = 1;    ///< what the losses' weights are divided by
  int64_t rows = 0;  ///< of the whole batch, which other processes must have alike
  /// Before and after each action that may give parameters gradients, by the stage's thread. Optional.
  std::function<void(const Action& action)> before_backward;
  std::function<void(const Action& action)> after_backward;
  /// By this process's stages; empty: no stage is on one.
  std::vector<StageRung> rungs;
  /// See PipelineWork. Optional.
  std::function<std::shared_ptr<void>()> thread_scope;
  /// See RecomputedForward. Optional.
  std::function<int64_t()> hidden_state;
  /// Fails the first action: what went wrong before it. Other processes learn of it as of any failure.
  std::exception_ptr refused;
};

/// A thread per rank, for ever, that runs its part of a schedule over the stages it has. Not thread-safe but for cancel() and
/// progress().
class BRIMFUL_API Executor {
 public:
  /// @throws c10::ValueError for no stages, no devices, or more devices than stages
  Executor(std::vector<Stage> stages, ExecutorOptions options);
  /// Waits for the threads.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Runs every action of a schedule, in the caller's grad mode, autocast and dispatch state. Returns when all ranks are
  /// idle: after a failure all others are cancelled before their next action, and nothing of the step is held. A schedule
  /// that check() with channels by_message does not find valid fails in the action that shows it, or waits for ever if it
  /// deadlocks. Synchronises no device.
  /// @throws c10::ValueError if the schedule is for another number of ranks or stages, or has ended with actions missing
  StepResult run(const Schedule& schedule, const StepWork& work);
  /// Ends a run() that is under way, from any thread: ranks stop before their next action, and wait for no message of this
  /// process any more. Nothing where there is none. Does not wait.
  void cancel();
  /// A run that was ended has returned while an action was still under way, which is what this says. What the action still
  /// does is lost: its gradients are dropped. Nothing can be run any more. Empty: not so.
  std::string abandoned() const;
  /// Where the ranks of this process are; empty where no run() is under way. From any thread; waits for none.
  std::vector<RankProgress> progress() const;

  /// Those of this process.
  const std::vector<Stage>& stages() const;
  const ExecutorOptions& options() const;
  /// Of all processes.
  int ranks() const;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace brimful::pipeline
