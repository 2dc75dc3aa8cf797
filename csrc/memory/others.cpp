#include "memory/others.h"
#include <brimful/memory/stats.h>
#include <algorithm>
#include "base/units.h"
#include "memory/cuda.h"
#include "memory/system_bounds.h"

namespace brimful::memory {
namespace {

int64_t at_least_0(int64_t bytes) {
  return std::max<int64_t>(0, bytes);
}

HeldByOthers on_cuda(c10::Device device) {
  const auto now = stats(device);
  const auto memory = cuda_memory(checked_cuda_index(device));
  HeldByOthers held;
  held.free_bytes = memory.free_bytes;
  held.where = "CUDA driver";
  if (!now.counted) {
    return held;
  }
  held.process_bytes = at_least_0(now.reserved_bytes - now.used_bytes);
  held.others_bytes = at_least_0(memory.total_bytes - memory.free_bytes - now.reserved_bytes);
  return held;
}

}  // namespace

HeldByOthers held_by_others_under(const std::string& root, int64_t tensor_bytes) {
  HeldByOthers held;
  const auto status = read_or_empty(root + "/proc/self/status");
  const auto process = parse_status(status);
  if (!status.empty()) {
    held.process_bytes = at_least_0(process.anonymous_bytes - tensor_bytes);
  }
  const auto note = [&](int64_t bytes, int64_t free_bytes, const std::string& where) {
    held.free_bytes = free_bytes;
    held.others_bytes = at_least_0(bytes - free_bytes - process.anonymous_bytes);
    held.where = where;
  };
  const auto meminfo = read_or_empty(root + "/proc/meminfo");
  const auto total = number_after(meminfo, "MemTotal:");
  const auto available = number_after(meminfo, "MemAvailable:");
  if (total && available) {
    note(*total * kKiB, *available * kKiB, "/proc/meminfo");
  }
  for (const auto& bound : cgroup_bounds(root, process)) {
    if (!held.free_bytes || bound.free_bytes < *held.free_bytes) {
      note(bound.bytes, bound.free_bytes, bound.where);
    }
  }
  return held;
}

HeldByOthers held_by_others(c10::Device device) noexcept {
  try {
    return device.is_cpu() ? held_by_others_under("", stats(device).used_bytes) : on_cuda(device);
  } catch (...) {  // a message about an error must not cause another one
    return {};
  }
}

}  // namespace brimful::memory
