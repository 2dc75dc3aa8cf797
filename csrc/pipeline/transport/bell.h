#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>

namespace brimful::pipeline {

/// What a rank's thread waits at: it looks again whenever it has been rung. It spins for a while and then sleeps, so that
/// a message between two short actions costs no wake-up, and a long wait costs no processor.
class Bell {
 public:
  /// Zero: sleep at once, as is right where there are more ranks than cores.
  void set_spin(std::chrono::nanoseconds spin) { spin_ = spin; }

  /// After what the other thread waits for has been stored.
  void ring() {
    rung_.fetch_add(1, std::memory_order_release);
    rung_.notify_all();
  }

  template <typename Ready>
  void wait_until(const Ready& ready) const {
    if (ready()) {
      return;
    }
    if (spin_.count() > 0) {
      const auto end = std::chrono::steady_clock::now() + spin_;
      do {
        for (int i = 0; i < 64; ++i) {
          if (ready()) {
            return;
          }
          pause();
        }
      } while (std::chrono::steady_clock::now() < end);
    }
    while (true) {
      const auto seen = rung_.load(std::memory_order_acquire);
      if (ready()) {
        return;
      }
      rung_.wait(seen, std::memory_order_acquire);
    }
  }

 private:
  static void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
  }

  std::atomic<int32_t> rung_{0};  ///< as wide as what the kernel waits for
  std::chrono::nanoseconds spin_{0};
};

}  // namespace brimful::pipeline
