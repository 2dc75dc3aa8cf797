#pragma once
// Sleeps that end on time. A timer's interrupt and a core that has fallen idle are each 50 us late on a virtual machine,
// and stages that spin until their time has come take each other's cores.
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

namespace bench {

/// Looks at the clock on every core that has nothing else to do, and wakes who sleeps until now. There is one at a time;
/// the process's cores do not fall idle while it is there.
class Alarm {
 public:
  using Clock = std::chrono::steady_clock;

  /// `idle_work` is what a core does while nobody is to be woken for a while; it takes less than that, and does not throw.
  explicit Alarm(void (*idle_work)()) {
    current_ = this;
    for (unsigned i = 0; i < std::thread::hardware_concurrency(); ++i) {
      watchers_.emplace_back([this, idle_work] {
        const sched_param lowest{};
        sched_setscheduler(0, SCHED_IDLE, &lowest);  // gives way to any other thread
        while (!done_.load(std::memory_order_relaxed)) {
          if (wake(Clock::now()) > kWhile) {
            idle_work();
          }
        }
      });
    }
  }
  ~Alarm() {
    done_ = true;
    for (auto& watcher : watchers_) {
      watcher.join();
    }
    current_ = nullptr;
  }
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

  static Alarm& current() { return *current_; }

  /// Up to 64 threads at a time.
  void sleep_until(Clock::time_point end) {
    for (auto& sleeper : sleepers_) {
      State free = State::free;
      if (sleeper.state.compare_exchange_strong(free, State::taken)) {
        sleeper.end = end;
        while (Clock::now() < end) {  // a watcher may have looked at the sleep before this one
          sleeper.state = State::asleep;
          sleeper.state.wait(State::asleep);
        }
        sleeper.state = State::free;
        return;
      }
    }
    throw std::runtime_error("more threads sleep than the alarm has room for");
  }

 private:
  static constexpr auto kWhile = std::chrono::microseconds(200);
  enum class State : int { free, taken, asleep, awake };  // as wide as what the kernel waits for

  struct alignas(64) Sleeper {
    std::atomic<State> state{State::free};
    std::atomic<Clock::time_point> end;
  };

  /// Returns the time until the next is to be woken.
  Clock::duration wake(Clock::time_point now) {
    auto next = Clock::duration::max();
    for (auto& sleeper : sleepers_) {
      State state = sleeper.state.load(std::memory_order_acquire);
      if (state != State::asleep) {
        continue;
      }
      const auto left = sleeper.end.load() - now;
      if (left.count() > 0) {
        next = std::min(next, left);
      } else if (sleeper.state.compare_exchange_strong(state, State::awake)) {
        sleeper.state.notify_one();
      }
    }
    return next;
  }

  static inline Alarm* current_ = nullptr;
  std::array<Sleeper, 64> sleepers_;
  std::atomic<bool> done_{false};
  std::vector<std::thread> watchers_;
};

}  // namespace bench
