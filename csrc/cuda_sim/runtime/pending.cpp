// What streams will write later, and may make known (what NCCL moves).
#include "pending.h"

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>

#include "sim_cuda.h"
#include "stream.h"

namespace {

struct Range {
  uintptr_t begin, end;
};

struct Pending {
  std::mutex mutex;
  std::condition_variable changed;
  long last = 0;
  std::map<long, Range> ranges;

  bool touches(uintptr_t begin, uintptr_t end) const {
    for (const auto& [number, range] : ranges) {
      if (range.begin < end && begin < range.end) {
        return true;
      }
    }
    return false;
  }
};

Pending& pending() {
  static auto* all = new Pending;
  return *all;
}

}  // namespace

namespace sim {

void settle(const void* begin, size_t bytes) {
  if (is_stream_thread()) {
    return;
  }
  const auto first = reinterpret_cast<uintptr_t>(begin);
  std::unique_lock lock(pending().mutex);
  pending().changed.wait(lock, [&] { return !pending().touches(first, first + bytes); });
}

}  // namespace sim

extern "C" {

long sim_cuda_will_write(const void* begin, size_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(begin);
  const std::lock_guard lock(pending().mutex);
  pending().ranges[++pending().last] = {first, first + bytes};
  return pending().last;
}

void sim_cuda_has_written(long number) {
  const std::lock_guard lock(pending().mutex);
  pending().ranges.erase(number);
  pending().changed.notify_all();
}
}
