#pragma once
#include <ATen/ThreadLocalState.h>
#include <brimful/pipeline/executor.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "pipeline/bell.h"
#include "pipeline/local_channel.h"
#include "pipeline/rank_run.h"

namespace brimful::pipeline {

class Executor::Impl {
 public:
  Impl(std::vector<Stage> stages, ExecutorOptions options);
  ~Impl();
  StepResult run(const Schedule& schedule, const StepWork& work);

  const std::vector<Stage> stages;
  const ExecutorOptions options;

 private:
  /// What the ranks' threads work on; set by run() before they are woken.
  struct Job {
    const Schedule* schedule = nullptr;
    const StepWork* work = nullptr;
    StepResult* result = nullptr;
    const at::ThreadLocalState* caller = nullptr;
    bool autocast = false;
  };

  int ranks() const { return static_cast<int>(options.devices.size()); }
  void place_stages(const Schedule& schedule);
  void connect();
  void prepare(const Schedule& schedule, StepResult& result);
  void thread_main(int rank);
  void run_rank(int rank);
  void run_actions(int rank, RankRun& run);
  void note_failure(int rank, int index, std::exception_ptr error);
  void cancel();
  void await_ranks();
  void end_work();

  std::vector<Bell> bells_;  ///< by rank
  Bell caller_bell_;
  std::atomic<uint64_t> job_number_{0};
  std::atomic<int> running_{0};
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> stop_{false};
  Job job_;
  std::mutex failure_mutex_;
  SkipBoard skips_;
  std::vector<int> rank_of_stage_;
  std::vector<StageRun> runs_;                           ///< by stage
  std::vector<std::unique_ptr<LocalChannel>> forward_;   ///< by stage: to the next one
  std::vector<std::unique_ptr<LocalChannel>> backward_;  ///< by stage: from the next one
  std::vector<std::jthread> threads_;                    ///< last: they use all of the above
};

}  // namespace brimful::pipeline
