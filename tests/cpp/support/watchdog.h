#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <string>
#include <thread>

namespace brimful::test {

/// Turns a hang into a failure: ends the process unless it is destroyed in time.
class Watchdog {
 public:
  explicit Watchdog(std::string test, std::chrono::seconds limit = std::chrono::seconds(20))
      : thread_([this, test = std::move(test), limit] { watch(test, limit); }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  void watch(const std::string& test, std::chrono::seconds limit) {
    std::unique_lock lock(mutex_);
    if (!wake_.wait_for(lock, limit, [this] { return done_; })) {
      std::cerr << "watchdog: the test hangs (test: " << test << ", limit: " << limit.count()
                << " s)" << std::endl;
      std::abort();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  bool done_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace brimful::test
