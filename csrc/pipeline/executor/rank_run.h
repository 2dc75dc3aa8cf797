#pragma once
#include <atomic>
#include <optional>
#include <vector>

#include "pipeline/executor/executor.h"
#include "pipeline/executor/keyword_scope.h"
#include "pipeline/executor/stage_run.h"
#include "pipeline/executor/turns.h"

namespace brimful::pipeline {

/// Runs the actions of one rank in one step; used by the rank's thread alone.
class RankRun {
 public:
  /// `counts_bytes`: what actions leave allocated is counted.
  /// `waits`: set while an action waits for its message.
  /// `rank`: its place in this process.
  RankRun(const StepWork& work, SkipBoard& skips, StepResult& result, bool counts_bytes,
          std::atomic<bool>& waits, Turns& turns, int rank, const std::atomic<bool>& cancelled)
      : work_(work),
        skips_(skips),
        result_(result),
        counts_bytes_(counts_bytes),
        waits_(waits),
        turns_(turns),
        rank_(rank),
        cancelled_(cancelled) {}

  /// @throws Cancelled, what the stage throws, and c10::ValueError where the schedule has the action too early or twice
  void run(StageRun& stage, const Action& action);
  /// In place of an action that will not run: what another process waits for, or sends.
  /// @throws c10::Error if the group broke
  static void make_up(StageRun& stage, const Action& action);
  /// How long the last action waited for its message.
  int64_t waited_ns() const { return waited_ns_; }

 private:
  void perform(StageRun& stage, const Action& action);
  /// Before what the caller has given is called: it may be gone when an abandoned action comes to it.
  /// @throws Cancelled
  void require_wanted() const;
  void forward(StageRun& stage, int microbatch);
  /// The first stage's, of the caller's batch.
  Value first_input(StageRun& stage, int microbatch);
  Value run_stage(StageRun& stage, int microbatch, const Value& input, KeywordScope& keywords);
  void finish_loss(StageRun& stage, int microbatch, const Value& output);
  void keep_outputs(StageRun& stage, int microbatch, Value output);
  void backward(StageRun& stage, int microbatch, bool input_only);
  void backward_weight(StageRun& stage, int microbatch);
  void act(StageRun& stage, const Action& action);
  /// In place of an action of a microbatch without rows.
  void pass_by(StageRun& stage, const Action& action);
  Message receive(Channel& channel, int microbatch);
  /// What an action uses: received by one of the schedule's own where `apart`, else here.
  Message take(Channel& channel, bool apart, std::optional<Message>& received, int microbatch);
  /// Where a backward begins.
  struct Roots {
    std::vector<at::Tensor> outputs;
    std::vector<at::Tensor> gradients;
  };
  Roots roots_of(StageRun& stage, int microbatch);
  static std::vector<at::Tensor> gradients_of_leaves(StageRun& stage, InFlight& flight,
                                                     const Roots& roots,
                                                     const std::vector<at::Tensor>& leaves,
                                                     bool input_only);
  std::vector<at::Tensor> output_gradients(StageRun& stage, int microbatch);
  static void send_outputs(StageRun& stage, int microbatch, Message message);
  void send_gradients(StageRun& stage, int microbatch, std::vector<at::Tensor> gradients);

  const StepWork& work_;
  SkipBoard& skips_;
  StepResult& result_;
  bool counts_bytes_;
  std::atomic<bool>& waits_;
  Turns& turns_;
  int rank_;
  const std::atomic<bool>& cancelled_;
  int64_t waited_ns_ = 0;
};

}  // namespace brimful::pipeline
