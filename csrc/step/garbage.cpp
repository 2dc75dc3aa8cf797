#include "step/garbage.h"

#include <brimful/memory/stats.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace brimful {
namespace {
// Small garbage is always there, and is no reason for another attempt.
constexpr int64_t kLeastBytes = 1 << 20;
constexpr int64_t kLeastShare = 100;

std::atomic<detail::GarbageCollector>& collector() {
  static std::atomic<detail::GarbageCollector> instance{nullptr};
  return instance;
}
}  // namespace

void detail::set_garbage_collector(GarbageCollector collect) {
  collector() = collect;
}

bool GarbageRemedy::helps(c10::Device device) {
  const auto collect = collector().load();
  if (collect == nullptr || std::exchange(collected_, true)) {
    return false;
  }
  const auto before = memory::stats(device).used_bytes;
  collect();
  const auto freed = before - memory::stats(device).used_bytes;
  if (freed < std::max(kLeastBytes, before / kLeastShare)) {
    return false;
  }
  freed_bytes_ = freed;
  return true;
}

int64_t GarbageRemedy::take_freed_bytes() {
  return std::exchange(freed_bytes_, 0);
}

}  // namespace brimful
