#include "memory/oom_observer.h"
#include <brimful/memory/fault.h>
#include <brimful/memory/live_table.h>
#include <brimful/memory/stats.h>
#include <atomic>

namespace brimful::memory {
namespace {

std::atomic<OomObserver> the_observer{nullptr};

// Of all threads: autograd has its own for each CUDA device.
std::atomic<int64_t> attempts{0};
constinit thread_local bool observing = false;

class Observing {
 public:
  Observing() noexcept { observing = true; }
  ~Observing() { observing = false; }
  Observing(const Observing&) = delete;
  Observing& operator=(const Observing&) = delete;

 private:
  Unlimited unlimited_;
};

}  // namespace

void set_oom_observer(OomObserver observer) noexcept {
  the_observer.store(observer, std::memory_order_release);
}

std::string observe_oom(c10::Device device, int64_t request_bytes) noexcept {
  const auto observer = the_observer.load(std::memory_order_acquire);
  if (observer == nullptr || observing || !tracking()) {
    return {};
  }
  try {
    const Observing scope;
    return observer(device, request_bytes, attempts.load(std::memory_order_relaxed) > 0);
  } catch (...) {  // a message about an error must not cause another one
    return {};
  }
}

RetryScope::RetryScope() noexcept {
  attempts.fetch_add(1, std::memory_order_relaxed);
}

RetryScope::~RetryScope() {
  attempts.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace brimful::memory
