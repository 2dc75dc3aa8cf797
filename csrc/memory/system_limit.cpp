#include <brimful/memory/stats.h>
#include <brimful/memory/system_limit.h>
#include <c10/util/Exception.h>
#include <algorithm>
#include "base/environment.h"
#include "base/units.h"
#include "memory/system_bounds.h"

namespace brimful::memory {
namespace {

constexpr int64_t kLeastMargin = int64_t{64} << 20;

int64_t margin_of(int64_t free_bytes) {
  return std::min(std::max(free_bytes / 20, kLeastMargin), free_bytes / 2);
}

/// Of the bytes that tensors hold, those that the bound's free bytes leave out. Address space is taken when a tensor is
/// made, memory when it is first written to.
int64_t counted_bytes(LimitSource source, const SystemFacts& facts, const ProcessMemory& process) {
  return source == LimitSource::address_space
             ? facts.tensor_bytes
             : std::min(facts.tensor_bytes, process.anonymous_bytes);
}

SystemLimit limit_under(const Bound& bound, const SystemFacts& facts,
                        const ProcessMemory& process) {
  SystemLimit limit;
  const bool own = bound.source == LimitSource::address_space;
  limit.free_bytes = bound.free_bytes / (own ? 1 : facts.processes);
  limit.margin_bytes = margin_of(limit.free_bytes);
  limit.limit_bytes =
      counted_bytes(bound.source, facts, process) + limit.free_bytes - limit.margin_bytes;
  limit.bound_bytes = bound.bytes;
  limit.source = bound.source;
  limit.where = bound.where;
  return limit;
}

}  // namespace

const char* name_of(LimitSource source) {
  switch (source) {
    case LimitSource::cgroup_v2:
      return "cgroup v2";
    case LimitSource::cgroup_v1:
      return "cgroup v1";
    case LimitSource::address_space:
      return "RLIMIT_AS";
    case LimitSource::available:
      return "MemAvailable";
  }
  return "";
}

ProcessMemory parse_status(std::string_view status) {
  ProcessMemory process;
  process.address_bytes = number_after(status, "VmSize:").value_or(0) * kKiB;
  const auto resident = number_after(status, "VmRSS:").value_or(0);
  process.anonymous_bytes = number_after(status, "RssAnon:").value_or(resident) * kKiB;
  return process;
}

SystemLimit tightest_limit(const SystemFacts& facts) {
  const auto process = parse_status(read_or_empty(facts.root + "/proc/self/status"));
  auto bounds = cgroup_bounds(facts.root, process);
  if (facts.address_limit) {
    bounds.push_back({LimitSource::address_space, "RLIMIT_AS", *facts.address_limit,
                      std::max<int64_t>(0, *facts.address_limit - process.address_bytes)});
  }
  const auto meminfo = read_or_empty(facts.root + "/proc/meminfo");
  if (const auto available = number_after(meminfo, "MemAvailable:")) {
    bounds.push_back(
        {LimitSource::available, "/proc/meminfo", *available * kKiB, *available * kKiB});
  }
  TORCH_CHECK_NOT_IMPLEMENTED(!bounds.empty(),
                              "nothing states how much memory this system has (files read: "
                              "/proc/self/cgroup, /proc/self/mountinfo, /proc/meminfo); give "
                              "set_limit a number of bytes");
  SystemLimit best = limit_under(bounds.front(), facts, process);
  for (const auto& bound : bounds) {
    const auto limit = limit_under(bound, facts, process);
    if (limit.limit_bytes < best.limit_bytes) {
      best = limit;
    }
  }
  return best;
}

SystemLimit system_limit() {
  SystemFacts facts;
  facts.address_limit = soft_limit(RLIMIT_AS);
  facts.tensor_bytes = stats(c10::Device(c10::DeviceType::CPU)).used_bytes;
  facts.processes = std::max<int64_t>(environment_number("LOCAL_WORLD_SIZE", 1), 1);
  return tightest_limit(facts);
}

SystemLimit set_limit_auto(c10::Device device) {
  TORCH_CHECK_VALUE(device.is_cpu(),
                    "only CPU memory has a bound that the system states (device: ", device,
                    "); pass a number of bytes or None: a CUDA device refuses what it lacks");
  release_cached(device);
  auto limit = system_limit();
  set_limit(device, limit.limit_bytes);
  return limit;
}

}  // namespace brimful::memory
