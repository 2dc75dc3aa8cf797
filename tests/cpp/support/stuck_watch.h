#pragma once
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace brimful::test {

/// Finds out that threads wait for each other for ever, without a time limit: the kernel says that all of them sleep, and
/// that none has been awake between two looks at them, so that none is left who could wake another.
class StuckWatch {
 public:
  using Tasks = std::vector<pid_t>;

  /// All threads of this process.
  static Tasks tasks() {
    Tasks found;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
      found.push_back(std::stoi(entry.path().filename()));
    }
    return found;
  }

  /// While it lives the caller and `others` are watched; `stuck` is called when they are, once.
  class Scope {
   public:
    Scope(StuckWatch& watch, const Tasks& others, std::function<void()> stuck) : watch_(watch) {
      auto all = others;
      all.push_back(::gettid());
      const std::lock_guard lock(watch_.mutex_);
      watch_.job_ = {std::move(all), std::move(stuck)};
      watch_.wake_.notify_one();
    }
    ~Scope() {
      const std::lock_guard lock(watch_.mutex_);
      watch_.job_.reset();
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    StuckWatch& watch_;
  };

  StuckWatch() : thread_([this] { watch(); }) {}
  ~StuckWatch() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }
  StuckWatch(const StuckWatch&) = delete;
  StuckWatch& operator=(const StuckWatch&) = delete;

 private:
  struct Job {
    Tasks tasks;
    std::function<void()> stuck;
  };

  /// How often each has slept; nothing where one is awake.
  static std::optional<std::vector<std::string>> sleeps_of(const Tasks& tasks) {
    std::vector<std::string> sleeps;
    for (const auto task : tasks) {
      std::ifstream status("/proc/self/task/" + std::to_string(task) + "/status");
      std::string counts;
      for (std::string line; std::getline(status, line);) {
        if (line.rfind("State:", 0) == 0 && line.find('S', 6) == std::string::npos) {
          return std::nullopt;
        }
        if (line.find("ctxt_switches:") != std::string::npos) {
          counts += line;
        }
      }
      if (counts.empty()) {
        return std::nullopt;
      }
      sleeps.push_back(counts);
    }
    return sleeps;
  }

  // Whoever ends a scope may sleep at the lock during a look: `stuck` is then called too late to matter.
  void watch() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return ended_ || job_; });
      if (ended_) {
        return;
      }
      const auto first = sleeps_of(job_->tasks);
      const auto second = first ? sleeps_of(job_->tasks) : std::nullopt;
      if (first && first == second) {
        const auto stuck = std::move(job_->stuck);
        job_.reset();
        stuck();
      }
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(300));
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::optional<Job> job_;
  bool ended_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace brimful::test
