#pragma once
#include <brimful/export.h>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace brimful::probes {

/// What /proc says about a process; what it does not say, or not to us, is nothing.
struct Process {
  int64_t pid = 0;
  int64_t parent = 0;
  std::string name;  ///< the kernel's: at most 15 characters, control characters as "\x1b"
  std::optional<int64_t> rss_bytes;  ///< resident; memory shared with others counts in each
  std::optional<int64_t> uss_bytes;  ///< what would be free if it ended: private pages only
  std::optional<int64_t> swap_bytes;
};

/// Nothing if there is no such process. Any thread. Reading the private pages walks the page table: milliseconds for
/// processes of many GiB.
BRIMFUL_API std::optional<Process> read_process(int64_t pid);

/// All that `pid` started and that they started, ancestors first.
BRIMFUL_API std::vector<Process> read_descendants(int64_t pid);

/// Those of this machine, or container, with the most resident memory, the largest first; without their private pages.
BRIMFUL_API std::vector<Process> largest_processes(size_t most);

/// True where pids of this process are the driver's: outside of containers. False where that cannot be known.
BRIMFUL_API bool pids_are_the_hosts();

/// How many CPUs this process may use: those it is bound to, and the cgroup's quota if it is less (1.5 of 64, say).
BRIMFUL_API double usable_cpus();

}  // namespace brimful::probes
