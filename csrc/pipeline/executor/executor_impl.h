#pragma once
#include <ATen/ThreadLocalState.h>
#include <c10/core/Stream.h>
#include <unistd.h>
#include "pipeline/executor/executor.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "pipeline/executor/placed_stages.h"
#include "pipeline/executor/rank_run.h"
#include "pipeline/executor/turns.h"
#include "pipeline/transport/bell.h"

namespace brimful::pipeline {

class Executor::Impl : public std::enable_shared_from_this<Executor::Impl> {
 public:
  Impl(std::vector<Stage> stages, ExecutorOptions options);
  ~Impl();
  StepResult run(const Schedule& schedule, const StepWork& work);
  void end_from_outside();
  std::string abandoned() const;
  std::vector<RankProgress> progress() const;
  /// Of all processes.
  int all_ranks() const { return placed_.all_ranks(); }

  const std::vector<Stage> stages;
  const ExecutorOptions options;

 private:
  /// What the ranks' threads work on; set by run() before they are woken. Its own copies: an abandoned action outlives run().
  struct Job {
    Schedule schedule;
    StepWork work;
    StepResult result{};
    std::optional<at::ThreadLocalState> caller{};
    bool is_on = false;
    bool autocast = false;
    bool keep_casts = true;              ///< autocast's cache
    std::vector<c10::Stream> streams{};  ///< the caller's current ones, of devices that have some
  };

  /// Where a rank is, for progress(); written by its thread.
  struct alignas(64) Place {
    std::atomic<int64_t> done{0};
    std::atomic<int64_t> began_ns{0};
    std::atomic<bool> waits{false};
    std::atomic<bool> idle{true};
  };

  /// To wait until the ranks are.
  struct Idle {
    std::mutex mutex;
    std::condition_variable all;
    std::atomic<int> running{0};
  };
  struct Signals {
    std::atomic<bool> cancelled{false};
    std::atomic<bool> ended{false};  ///< by end_from_outside()
    std::atomic<bool> stop{false};
  };
  struct Abandoned {
    std::atomic<bool> is{false};
    std::string text;            ///< what still ran
    std::shared_ptr<Impl> self;  ///< until the last thread of an abandoned run has ended
    std::vector<at::Tensor> late_gradients;  ///< that an abandoned action may be adding to
  };

  /// Of this process.
  int ranks() const { return static_cast<int>(options.devices.size()); }
  void wake_ranks();
  void begin_job(Job job);
  void end_job();
  void finish(const Schedule& schedule, StepResult& result);
  void thread_main(int rank);
  void run_rank(int rank);
  void run_actions(int rank, RankRun& run);
  void drain(int rank, size_t from, RankRun& run);
  void note_failure(int rank, int index, std::exception_ptr error);
  void cancel();
  void stop();
  /// In a child of the process that made it, which has none of its threads.
  bool is_forked() const;
  void await_ranks();
  /// Whether all have become idle in that time.
  bool await_ranks(std::chrono::milliseconds patience);
  void end_work(int rank);

  // abandon.cpp
  /// Waits for the ranks; false: the run was ended, and one of them has gone on for too long.
  bool await_end(std::exception_ptr& interrupted);
  void ask_for_interrupt(std::exception_ptr& thrown) const;
  void abandon();
  void drop_late_gradients(const Stage& stage);
  void enter_thread() const;
  /// The last thing that a rank's thread does here.
  void leave_thread();

  const pid_t process_ = ::getpid();
  std::vector<Bell> bells_;  ///< by rank
  Idle idle_;
  std::atomic<uint64_t> job_number_{0};
  Signals signals_;
  Job job_;
  mutable std::mutex job_mutex_;  ///< between progress() and the beginning and end of run()
  std::vector<Place> places_;     ///< by rank
  std::mutex failure_mutex_;
  SkipBoard skips_;
  Turns turns_;
  PlacedStages placed_{stages, options, bells_, signals_.cancelled};
  const uint64_t number_;  ///< no other executor has it
  Abandoned abandoned_;
  std::atomic<int> threads_left_{ranks()};
  std::vector<std::jthread> threads_;  ///< last: they use all of the above
};

}  // namespace brimful::pipeline
