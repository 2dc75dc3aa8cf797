#pragma once
#include <brimful/memory/system_limit.h>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// Where system_limit() gets its numbers: functions on the texts of files, and on a root folder instead of "/".
namespace brimful::memory {

struct Bound {
  LimitSource source = LimitSource::available;
  std::string where;
  int64_t bytes = 0;
  int64_t free_bytes = 0;  ///< of `bytes`, what is not in use; never negative
};

/// This process, from /proc/self/status; 0 where the text lacks a line.
struct ProcessMemory {
  int64_t address_bytes = 0;    ///< VmSize
  int64_t anonymous_bytes = 0;  ///< RssAnon, or VmRSS of older kernels
};
ProcessMemory parse_status(std::string_view status);

/// Empty where it cannot be read.
std::string read_or_empty(const std::string& path);

/// The number that follows `key` in the line that begins with it.
std::optional<int64_t> number_after(std::string_view text, std::string_view key);

/// The folders of this process's cgroup (v1: of this controller) and of all above it up to the mount point, innermost
/// first. `cgroups` is /proc/self/cgroup, `mounts` /proc/self/mountinfo. A cgroup that lies outside of what is mounted
/// gives the mount point.
std::vector<std::string> cgroup_folders(std::string_view cgroups, std::string_view mounts,
                                        LimitSource version,
                                        std::string_view controller = "memory");

/// The bounds that the cgroups state, with `root` in front of every path; cgroups without one are left out.
std::vector<Bound> cgroup_bounds(const std::string& root, const ProcessMemory& process);

/// What is given: everything that `root` and the other arguments state.
struct SystemFacts {
  std::string root;  ///< in front of every path; empty: the system's own
  std::optional<int64_t> address_limit;
  int64_t tensor_bytes = 0;  ///< held by live tensors
  int64_t processes = 1;     ///< that share the host
};
/// @throws c10::NotImplementedError if there is no bound
SystemLimit tightest_limit(const SystemFacts& facts);

}  // namespace brimful::memory
