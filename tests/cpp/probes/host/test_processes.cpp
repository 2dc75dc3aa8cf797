#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include "probes/host/proc_files.h"
#include "support/catch.h"

namespace test_processes {

using namespace brimful::probes;

namespace {

class MadeUpProc {
 public:
  MadeUpProc() {
    root = (std::filesystem::temp_directory_path() / "brimful_XXXXXX").string();
    REQUIRE(mkdtemp(root.data()) != nullptr);
  }
  ~MadeUpProc() { std::filesystem::remove_all(root); }
  MadeUpProc(const MadeUpProc&) = delete;
  MadeUpProc& operator=(const MadeUpProc&) = delete;

  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(root + path).parent_path());
    std::ofstream(root + path) << text;
  }
  void process(int pid, int parent) const {
    write("/proc/" + std::to_string(pid) + "/status", "Name:\tpython3 -u\nPPid:\t" +
                                                          std::to_string(parent) +
                                                          "\nVmRSS:\t 100 kB\nVmSwap:\t 3 kB\n");
  }
  std::vector<int64_t> descendants(int64_t pid) const {
    std::vector<int64_t> pids;
    for (const auto& process : read_descendants_under(root, pid)) {
      pids.push_back(process.pid);
    }
    std::sort(pids.begin(), pids.end());
    return pids;
  }

  std::string root;
};

}  // namespace

TEST_CASE("Names drive no terminal, and the largest processes come first", "[probes]") {
  const MadeUpProc proc;
  proc.write("/proc/3/status", "Name:\tkthreadd\nPPid:\t2\n");  // the kernel's: has no memory
  proc.write("/proc/7/status", "Name:\ta\x1b[2Jb\nPPid:\t1\nVmRSS:\t 100 kB\n");
  proc.write("/proc/8/status", "Name:\tlarge\nPPid:\t1\nVmRSS:\t 300 kB\n");
  proc.write("/proc/9/status", "Name:\tmiddle\nPPid:\t1\nVmRSS:\t 200 kB\n");
  CHECK(read_process_under(proc.root, 7)->name == "a\\x1b[2Jb");
  const auto names = [&](size_t most) {
    std::string text;
    for (const auto& process : largest_processes_under(proc.root, most)) {
      text += process.name + " ";
    }
    return text;
  };
  CHECK(names(2) == "large middle ");
  CHECK(names(9) == "large middle a\\x1b[2Jb ");
}

TEST_CASE("A process's memory is what /proc says", "[probes]") {
  const MadeUpProc proc;
  proc.process(7, 1);
  auto process = read_process_under(proc.root, 7);
  REQUIRE(process);
  CHECK(process->name == "python3 -u");
  CHECK(process->parent == 1);
  CHECK(process->rss_bytes == 100 * 1024);
  CHECK(process->swap_bytes == 3 * 1024);
  CHECK_FALSE(process->uss_bytes);  // another user's: not shown
  proc.write("/proc/7/smaps_rollup",
             "Rss: 100 kB\nPrivate_Clean: 5 kB\nPrivate_Dirty:  20 kB\nPrivate_Hugetlb: 1 kB\n");
  process = read_process_under(proc.root, 7);
  CHECK(process->uss_bytes == 26 * 1024);
  CHECK_FALSE(read_process_under(proc.root, 8));
  const auto self = read_process(getpid());
  REQUIRE(self);
  CHECK(self->uss_bytes.value_or(1) <= self->rss_bytes.value_or(0));
}

TEST_CASE("Descendants are found with and without the kernel's list", "[probes]") {
  const MadeUpProc proc;
  for (const auto& [pid, parent] : {std::pair{7, 1}, {8, 7}, {9, 8}, {10, 7}, {11, 1}}) {
    proc.process(pid, parent);
    proc.write("/proc/" + std::to_string(pid) + "/task/" + std::to_string(pid) + "/comm", "x");
  }
  CHECK(proc.descendants(7) == std::vector<int64_t>{8, 9, 10});
  for (const int pid : {8, 9, 10}) {
    proc.write("/proc/" + std::to_string(pid) + "/task/" + std::to_string(pid) + "/children", "");
  }
  proc.write("/proc/7/task/7/children", "8 10 99 ");  // 99 has just ended
  proc.write("/proc/7/task/70/children", "8");
  proc.write("/proc/8/task/8/children", "9 ");
  CHECK(proc.descendants(7) == std::vector<int64_t>{8, 9, 10});
  CHECK(proc.descendants(12345).empty());
}

TEST_CASE("A child of this process is seen", "[probes]") {
  const auto child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  const auto found = read_descendants(getpid());
  CHECK(std::any_of(found.begin(), found.end(), [&](const auto& p) { return p.pid == child; }));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

TEST_CASE("The tightest CPU quota of all cgroups counts", "[probes]") {
  const MadeUpProc proc;
  CHECK_FALSE(cpu_quota_under(proc.root));
  proc.write("/proc/self/cgroup", "0::/job/step\n");
  proc.write("/proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  proc.write("/sys/fs/cgroup/job/step/cpu.max", "max 100000\n");
  CHECK_FALSE(cpu_quota_under(proc.root));
  proc.write("/sys/fs/cgroup/job/cpu.max", "150000 100000\n");
  CHECK(cpu_quota_under(proc.root) == 1.5);
  proc.write("/proc/self/cgroup", "4:memory:/m\n3:cpu,cpuacct:/c\n");
  proc.write("/proc/self/mountinfo", "33 30 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n");
  proc.write("/sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "50000\n");
  proc.write("/sys/fs/cgroup/cpu/c/cpu.cfs_period_us", "100000\n");
  CHECK(cpu_quota_under(proc.root) == 0.5);
  proc.write("/sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "-1\n");
  CHECK_FALSE(cpu_quota_under(proc.root));
  CHECK(usable_cpus() > 0);
}

TEST_CASE("Only the first pid namespace is the host's", "[probes]") {
  const MadeUpProc proc;
  CHECK_FALSE(pids_are_the_hosts_under(proc.root));
  std::filesystem::create_directories(proc.root + "/proc/self/ns");
  std::filesystem::create_symlink("pid:[4026532198]", proc.root + "/proc/self/ns/pid");
  CHECK_FALSE(pids_are_the_hosts_under(proc.root));
  std::filesystem::remove(proc.root + "/proc/self/ns/pid");
  std::filesystem::create_symlink("pid:[4026531836]", proc.root + "/proc/self/ns/pid");
  CHECK(pids_are_the_hosts_under(proc.root));
}

}  // namespace test_processes
