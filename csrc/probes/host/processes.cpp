#include <dirent.h>
#include <sched.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <memory>
#include <string_view>
#include <thread>
#include "base/one_line.h"
#include "base/units.h"
#include "memory/system_bounds.h"
#include "probes/host/proc_files.h"

namespace brimful::probes {
namespace {

using memory::number_after;
using memory::read_or_empty;

// The inode of the first pid namespace (PROC_PID_INIT_INO of Linux): containers have others.
constexpr const char* kHostPids = "pid:[4026531836]";

std::optional<int64_t> kib_after(const std::string& text, const char* key) {
  const auto number = number_after(text, key);
  return number ? std::optional(*number * kKiB) : std::nullopt;
}

std::string line_after(const std::string& text, const std::string& key) {
  const auto at = text.find(key);
  if (at == std::string::npos) {
    return "";
  }
  const auto begin = text.find_first_not_of(" \t", at + key.size());
  return begin == std::string::npos ? "" : text.substr(begin, text.find('\n', begin) - begin);
}

/// What is in a folder whose names are numbers; none where it cannot be read.
std::vector<int64_t> numbers_in(const std::string& folder) {
  struct Close {
    void operator()(DIR* open) const { closedir(open); }
  };
  std::vector<int64_t> numbers;
  const std::unique_ptr<DIR, Close> open(opendir(folder.c_str()));
  while (const dirent* entry = open ? readdir(open.get()) : nullptr) {
    if (const auto number = number_after(entry->d_name, "")) {
      numbers.push_back(*number);
    }
  }
  return numbers;
}

std::vector<int64_t> all_pids(const std::string& root) {
  return numbers_in(root + "/proc");
}

std::string folder_of(const std::string& root, int64_t pid) {
  return root + "/proc/" + std::to_string(pid);
}

/// Those whose parent is `pid`, by each of its threads; nothing where the kernel does not list them.
std::optional<std::vector<int64_t>> listed_children(const std::string& root, int64_t pid) {
  std::vector<int64_t> children;
  const auto threads = folder_of(root, pid) + "/task";
  for (const auto thread : numbers_in(threads)) {
    const auto file = threads + "/" + std::to_string(thread) + "/children";
    if (access(file.c_str(), F_OK) != 0) {
      return std::nullopt;
    }
    std::string text = read_or_empty(file);
    std::replace(text.begin(), text.end(), ' ', '\n');
    for (size_t begin = 0; begin < text.size();) {
      const auto end = std::min(text.find('\n', begin), text.size());
      if (const auto child = number_after(text.substr(begin, end - begin), "")) {
        children.push_back(*child);
      }
      begin = end + 1;
    }
  }
  return children;
}

std::vector<int64_t> children_of(const std::string& root, int64_t pid) {
  if (auto listed = listed_children(root, pid)) {
    return *listed;
  }
  std::vector<int64_t> children;
  for (const auto other : all_pids(root)) {
    if (number_after(read_or_empty(folder_of(root, other) + "/status"), "PPid:") == pid) {
      children.push_back(other);
    }
  }
  return children;
}

/// v2: "max 100000" or "150000 100000" in cpu.max; v1: two files.
std::optional<double> quota_in(const std::string& folder, memory::LimitSource version) {
  std::optional<int64_t> quota;
  std::optional<int64_t> period;
  if (version == memory::LimitSource::cgroup_v2) {
    const auto text = read_or_empty(folder + "/cpu.max");
    quota = number_after(text, "");
    const auto space = text.find(' ');
    period = space == std::string::npos ? std::nullopt : number_after(text.substr(space), "");
  } else {
    quota = number_after(read_or_empty(folder + "/cpu.cfs_quota_us"), "");
    period = number_after(read_or_empty(folder + "/cpu.cfs_period_us"), "");
  }
  if (!quota || !period || *quota <= 0 || *period <= 0) {
    return std::nullopt;
  }
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

std::optional<Process> read_status(const std::string& folder, int64_t pid) {
  const auto status = read_or_empty(folder + "/status");
  if (status.empty()) {
    return std::nullopt;
  }
  Process process;
  process.pid = pid;
  process.parent = number_after(status, "PPid:").value_or(0);
  process.name = one_line(line_after(status, "Name:"));
  process.rss_bytes = kib_after(status, "VmRSS:");
  process.swap_bytes = kib_after(status, "VmSwap:");
  return process;
}

}  // namespace

std::optional<Process> read_process_under(const std::string& root, int64_t pid) {
  const auto folder = folder_of(root, pid);
  auto process = read_status(folder, pid);
  if (!process) {
    return std::nullopt;
  }
  const auto pages = read_or_empty(folder + "/smaps_rollup");
  const auto clean = kib_after(pages, "Private_Clean:");
  const auto dirty = kib_after(pages, "Private_Dirty:");
  if (clean && dirty) {
    process->uss_bytes = *clean + *dirty + kib_after(pages, "Private_Hugetlb:").value_or(0);
  }
  return process;
}

std::vector<Process> read_descendants_under(const std::string& root, int64_t pid) {
  std::vector<int64_t> waiting = children_of(root, pid);
  std::vector<Process> found;
  for (size_t i = 0; i < waiting.size(); ++i) {
    const bool seen = std::any_of(found.begin(), found.end(),
                                  [&](const auto& process) { return process.pid == waiting[i]; });
    const auto process = read_process_under(root, waiting[i]);
    if (seen || !process) {
      continue;
    }
    found.push_back(*process);
    const auto more = children_of(root, waiting[i]);
    waiting.insert(waiting.end(), more.begin(), more.end());
  }
  return found;
}

std::vector<Process> largest_processes_under(const std::string& root, size_t most) {
  std::vector<Process> all;
  for (const auto pid : all_pids(root)) {
    auto process = read_status(folder_of(root, pid), pid);
    if (process && process->rss_bytes.value_or(0) > 0) {
      all.push_back(std::move(*process));
    }
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const auto& a, const auto& b) { return *a.rss_bytes > *b.rss_bytes; });
  all.resize(std::min(all.size(), most));
  return all;
}

bool pids_are_the_hosts_under(const std::string& root) {
  std::array<char, 64> target{};
  const auto path = root + "/proc/self/ns/pid";
  const auto size = readlink(path.c_str(), target.data(), target.size());
  return size > 0 && std::string_view(target.data(), static_cast<size_t>(size)) == kHostPids;
}

std::optional<double> cpu_quota_under(const std::string& root) {
  const auto cgroups = read_or_empty(root + "/proc/self/cgroup");
  const auto mounts = read_or_empty(root + "/proc/self/mountinfo");
  std::optional<double> tightest;
  for (const auto version : {memory::LimitSource::cgroup_v2, memory::LimitSource::cgroup_v1}) {
    for (const auto& folder : memory::cgroup_folders(cgroups, mounts, version, "cpu")) {
      const auto quota = quota_in(root + folder, version);
      if (quota && (!tightest || *quota < *tightest)) {
        tightest = quota;
      }
    }
  }
  return tightest;
}

std::optional<Process> read_process(int64_t pid) {
  return read_process_under("", pid);
}

std::vector<Process> largest_processes(size_t most) {
  return largest_processes_under("", most);
}

std::vector<Process> read_descendants(int64_t pid) {
  return read_descendants_under("", pid);
}

bool pids_are_the_hosts() {
  return pids_are_the_hosts_under("");
}

double usable_cpus() {
  cpu_set_t bound;
  CPU_ZERO(&bound);
  const double cpus = sched_getaffinity(0, sizeof(bound), &bound) == 0
                          ? CPU_COUNT(&bound)
                          : std::max(1U, std::thread::hardware_concurrency());
  const auto quota = cpu_quota_under("");
  return quota ? std::min(cpus, *quota) : cpus;
}

}  // namespace brimful::probes
