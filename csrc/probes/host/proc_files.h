#pragma once
#include <brimful/probes/processes.h>

/// The functions of processes.h on a root folder instead of "/".
namespace brimful::probes {

std::optional<Process> read_process_under(const std::string& root, int64_t pid);
std::vector<Process> read_descendants_under(const std::string& root, int64_t pid);
std::vector<Process> largest_processes_under(const std::string& root, size_t most);
bool pids_are_the_hosts_under(const std::string& root);

/// The tightest quota of this process's cgroup and of all above it, in CPUs.
std::optional<double> cpu_quota_under(const std::string& root);

}  // namespace brimful::probes
