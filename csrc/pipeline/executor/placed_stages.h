#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "pipeline/executor/executor.h"
#include "pipeline/executor/stage_run.h"
#include "pipeline/executor/turns.h"
#include "pipeline/transport/bell.h"
#include "pipeline/transport/channel.h"
#include "pipeline/transport/peers.h"

namespace brimful::pipeline {

/// Stages on the ranks that a schedule gives them, and the channels between them.
class PlacedStages {
 public:
  /// All of them outlive it. `bells`: by rank of this process.
  PlacedStages(const std::vector<Stage>& stages, const ExecutorOptions& options,
               std::vector<Bell>& bells, const std::atomic<bool>& cancelled)
      : stages_(stages), options_(options), bells_(bells), cancelled_(cancelled) {}

  /// The schedule's number of the first rank of this process.
  int first_rank() const { return options_.peers ? options_.peers->rank() : 0; }
  /// Of all processes.
  int all_ranks() const {
    return options_.peers ? options_.peers->size() : static_cast<int>(options_.devices.size());
  }

  /// @throws c10::ValueError if the schedule is for another number of ranks or stages
  void place(const Schedule& schedule);
  /// Makes ready for a step of a schedule by which they are placed.
  void begin(const Schedule& schedule, const StepWork& work, Turns& turns);
  /// By stage; empty ones for those of other processes.
  std::vector<StageRun>& runs() { return runs_; }
  int rank_of(int stage) const { return rank_of_stage_[stage]; }
  /// Lets go of what a rank's stages hold, by the thread that made it.
  void drop(int rank);
  /// Of all that a step has left.
  void drop_all(int microbatches);
  /// What was sent has gone.
  void flush() const;

 private:
  bool is_here(int rank) const {
    return rank >= first_rank() && rank < first_rank() + std::ssize(options_.devices);
  }
  void connect();
  Channel* connect(int from, int to, int number);

  const std::vector<Stage>& stages_;
  const ExecutorOptions& options_;
  std::vector<Bell>& bells_;
  const std::atomic<bool>& cancelled_;
  std::vector<int> rank_of_stage_;
  std::vector<StageRun> runs_;
  std::vector<std::unique_ptr<Channel>> channels_;  ///< that end or begin here
};

}  // namespace brimful::pipeline
