#pragma once
// Sleeps that end on time. A timer's interrupt and a core that has fallen idle are each 50 us late on a virtual machine,
// and stages that spin until their time has come take each other's cores.
#include <sched.h>

#include <array>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

namespace bench {

/// Looks at the clock on every core that has nothing else to do, and wakes who sleeps until now.
class Alarm {
 public:
  using Clock = std::chrono::steady_clock;

  /// The process's own; its cores do not fall idle from the first call on.
  static Alarm& instance() {
    static Alarm alarm;
    return alarm;
  }

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
  enum class State : int { free, taken, asleep, awake };  // as wide as what the kernel waits for

  struct alignas(64) Sleeper {
    std::atomic<State> state{State::free};
    std::atomic<Clock::time_point> end;
  };

  Alarm() {
    for (unsigned i = 0; i < std::thread::hardware_concurrency(); ++i) {
      watchers_.emplace_back([this] {
        const sched_param lowest{};
        sched_setscheduler(0, SCHED_IDLE, &lowest);  // gives way to any other thread
        while (!done_.load(std::memory_order_relaxed)) {
          wake(Clock::now());
        }
      });
    }
  }
  ~Alarm() {
    done_ = true;
    for (auto& watcher : watchers_) {
      watcher.join();
    }
  }

  void wake(Clock::time_point now) {
    for (auto& sleeper : sleepers_) {
      State state = sleeper.state.load(std::memory_order_acquire);
      if (state == State::asleep && sleeper.end.load() <= now &&
          sleeper.state.compare_exchange_strong(state, State::awake)) {
        sleeper.state.notify_one();
      }
    }
  }

  std::array<Sleeper, 64> sleepers_;
  std::atomic<bool> done_{false};
  std::vector<std::thread> watchers_;
};

}  // namespace bench
