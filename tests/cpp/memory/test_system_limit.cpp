#include <brimful/memory/stats.h>
#include <brimful/memory/system_limit.h>
#include <c10/util/Exception.h>
#include <stdlib.h>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>
#include "memory/system_bounds.h"
#include "support/catch.h"
#include "support/scoped_env.h"

namespace test_system_limit {

namespace memory = brimful::memory;
using memory::LimitSource;

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;
const c10::Device kCpu(c10::DeviceType::CPU);

/// A root folder with files of one's own, gone with it.
class MadeUpSystem {
 public:
  MadeUpSystem() {
    std::string name = (std::filesystem::temp_directory_path() / "brimful_XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    facts.root = name;
    write("/proc/self/status",
          "VmSize:\t 3145728 kB\nVmRSS:\t 2097152 kB\nRssAnon:\t 1048576 kB\n");
  }
  ~MadeUpSystem() { std::filesystem::remove_all(facts.root); }
  MadeUpSystem(const MadeUpSystem&) = delete;
  MadeUpSystem& operator=(const MadeUpSystem&) = delete;

  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(facts.root + path).parent_path());
    std::ofstream(facts.root + path) << text;
  }
  void available(int64_t bytes) {
    write("/proc/meminfo",
          "MemTotal:       99999999 kB\nMemAvailable:   " + std::to_string(bytes / 1024) + " kB\n");
  }
  void v2(const std::string& folder, const std::string& max, int64_t current, int64_t idle = 0) {
    write(folder + "/memory.max", max + "\n");
    write(folder + "/memory.current", std::to_string(current) + "\n");
    write(folder + "/memory.stat",
          "anon 1\nactive_file 77\ninactive_file " + std::to_string(idle) + "\n");
  }
  memory::SystemLimit limit() const { return memory::tightest_limit(facts); }

  memory::SystemFacts facts;
};

const std::string kV2Mount =
    "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
const std::string kV1Mounts =
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";

using Folders = std::vector<std::string>;

Folders v2_folders(const std::string& cgroups, const std::string& mounts) {
  return memory::cgroup_folders(cgroups, mounts, LimitSource::cgroup_v2);
}

Folders v1_folders(const std::string& cgroups, const std::string& mounts) {
  return memory::cgroup_folders(cgroups, mounts, LimitSource::cgroup_v1);
}

}  // namespace

TEST_CASE("a number is read from the line that begins with its key", "[memory]") {
  const std::string text = "total_inactive_file 5\ninactive_file 7\nMemAvailable:   12 kB\nmax\n";
  CHECK(memory::number_after(text, "inactive_file") == 7);
  CHECK(memory::number_after(text, "total_inactive_file") == 5);
  CHECK(memory::number_after(text, "MemAvailable:") == 12);
  CHECK(memory::number_after(text, "inactive") == std::nullopt);
  CHECK(memory::number_after(text, "MemFree:") == std::nullopt);
  CHECK(memory::number_after("max\n", "") == std::nullopt);
  CHECK(memory::number_after("4096\n", "") == 4096);
  CHECK(memory::number_after("99999999999999999999\n", "") == std::nullopt);
  CHECK(memory::number_after("", "") == std::nullopt);
}

TEST_CASE("cgroups are found from the process's own to the mount point", "[memory]") {
  CHECK(v2_folders("0::/a/b.slice\n", kV2Mount) ==
        Folders{"/sys/fs/cgroup/a/b.slice", "/sys/fs/cgroup/a", "/sys/fs/cgroup"});
  CHECK(v2_folders("0::/\n", kV2Mount) == Folders{"/sys/fs/cgroup"});
  const std::string hybrid = "5:cpu,cpuacct:/c\n4:memory:/jobs/7:x\n0::/u\n";
  CHECK(v1_folders(hybrid, kV1Mounts) == Folders{"/sys/fs/cgroup/memory/jobs/7:x",
                                                 "/sys/fs/cgroup/memory/jobs",
                                                 "/sys/fs/cgroup/memory"});
  CHECK(v2_folders(hybrid, kV1Mounts) ==
        Folders{"/sys/fs/cgroup/unified/u", "/sys/fs/cgroup/unified"});
}

TEST_CASE("a container sees its own part of the cgroups", "[memory]") {
  const std::string mounts =
      "1 2 0:3 /other /elsewhere rw - cgroup2 cgroup2 rw\n"
      "4 5 0:6 /docker/abc /mnt/the\\040cgroups rw - cgroup2 cgroup2 rw\n";
  CHECK(v2_folders("0::/docker/abc/inner\n", mounts) ==
        Folders{"/mnt/the cgroups/inner", "/mnt/the cgroups"});
  CHECK(v2_folders("0::/docker/abc\n", mounts) == Folders{"/mnt/the cgroups"});
  // Neither of these is below /docker/abc: the mount point is all that can be seen.
  CHECK(v2_folders("0::/docker/abcdef\n", mounts) == Folders{"/elsewhere"});
  CHECK(v2_folders("0::/../sibling\n", kV2Mount) == Folders{"/sys/fs/cgroup"});
}

TEST_CASE("without a memory cgroup there are no folders", "[memory]") {
  CHECK(v2_folders("", kV2Mount).empty());
  CHECK(v2_folders("4:memory:/a\n", kV2Mount).empty());
  CHECK(v1_folders("3:cpu:/a\n0::/a\n", kV1Mounts).empty());
  CHECK(v1_folders("4:memory:/a\n", kV2Mount).empty());
  CHECK(v2_folders("0::/a\n", "no mount - at all\n").empty());
  CHECK(v2_folders("nonsense\n0\n", kV2Mount).empty());
}

TEST_CASE("the tightest cgroup of all above the process decides", "[memory]") {
  MadeUpSystem system;
  system.available(64 * kGiB);
  system.write("/proc/self/cgroup", "0::/jobs/7\n");
  system.write("/proc/self/mountinfo", kV2Mount);
  system.v2("/sys/fs/cgroup/jobs/7", "max", kGiB);
  system.v2("/sys/fs/cgroup/jobs", std::to_string(8 * kGiB), 5 * kGiB, kGiB);
  auto limit = system.limit();
  CHECK(limit.source == LimitSource::cgroup_v2);
  CHECK(limit.where == "/sys/fs/cgroup/jobs/memory.max");
  CHECK(limit.bound_bytes == 8 * kGiB);
  CHECK(limit.free_bytes == 4 * kGiB);  // 8 less 5, of which 1 is idle page cache
  CHECK(limit.margin_bytes == 4 * kGiB / 20);
  CHECK(limit.limit_bytes == limit.free_bytes - limit.margin_bytes);
  system.v2("/sys/fs/cgroup/jobs/7", std::to_string(3 * kGiB), kGiB);
  limit = system.limit();
  CHECK(limit.where == "/sys/fs/cgroup/jobs/7/memory.max");
  CHECK(limit.free_bytes == 2 * kGiB);
  system.v2("/sys/fs/cgroup/jobs/7", std::to_string(kGiB), 2 * kGiB);
  CHECK(system.limit().limit_bytes == 0);  // in use beyond the bound
}

TEST_CASE("cgroup v1 has its own files and its own way to state no bound", "[memory]") {
  MadeUpSystem system;
  system.available(64 * kGiB);
  system.write("/proc/self/cgroup", "4:memory:/jobs\n0::/\n");
  system.write("/proc/self/mountinfo", kV1Mounts);
  const std::string folder = "/sys/fs/cgroup/memory/jobs";
  system.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  system.write(folder + "/memory.limit_in_bytes", std::to_string(4 * kGiB) + "\n");
  system.write(folder + "/memory.usage_in_bytes", std::to_string(3 * kGiB) + "\n");
  system.write(folder + "/memory.stat",
               "inactive_file 1\ntotal_inactive_file " + std::to_string(kGiB) + "\n");
  auto limit = system.limit();
  CHECK(limit.source == LimitSource::cgroup_v1);
  CHECK(limit.where == folder + "/memory.limit_in_bytes");
  CHECK(limit.free_bytes == 2 * kGiB);
  system.write(folder + "/memory.limit_in_bytes", "9223372036854771712\n");
  limit = system.limit();
  CHECK(limit.source == LimitSource::available);
  CHECK(limit.bound_bytes == 64 * kGiB);
  system.write("/proc/meminfo", "");
  CHECK_THROWS_AS(system.limit(), c10::NotImplementedError);
}

TEST_CASE("a cgroup that hides what is in use counts this process's memory", "[memory]") {
  MadeUpSystem system;
  system.write("/proc/self/cgroup", "0::/\n");
  system.write("/proc/self/mountinfo", kV2Mount);
  system.write("/sys/fs/cgroup/memory.max", std::to_string(3 * kGiB) + "\n");
  CHECK(system.limit().free_bytes == 2 * kGiB);
  system.write("/proc/self/status", "VmRSS:\t 2097152 kB\n");  // a kernel without RssAnon
  CHECK(system.limit().free_bytes == kGiB);
}

TEST_CASE("the address space in use is taken off RLIMIT_AS", "[memory]") {
  MadeUpSystem system;
  system.available(2 * kGiB);
  system.facts.address_limit = 4 * kGiB;
  const auto limit = system.limit();
  CHECK(limit.source == LimitSource::address_space);
  CHECK(limit.where == "RLIMIT_AS");
  CHECK(limit.bound_bytes == 4 * kGiB);
  CHECK(limit.free_bytes == kGiB);
  CHECK(limit.margin_bytes == 64 * kMiB);
  system.facts.address_limit = 8 * kGiB;
  CHECK(system.limit().source == LimitSource::available);
}

TEST_CASE("tensors that live are added to what is free, once", "[memory]") {
  MadeUpSystem system;
  system.available(2 * kGiB);
  const int64_t nothing_held = system.limit().limit_bytes;
  system.facts.tensor_bytes = 512 * kMiB;
  CHECK(system.limit().limit_bytes == nothing_held + 512 * kMiB);
  // 4 GiB of tensors in 1 GiB of memory: the rest was never written to, and is in the 2 GiB that are free.
  system.facts.tensor_bytes = 4 * kGiB;
  CHECK(system.limit().limit_bytes == nothing_held + kGiB);
  // Address space is taken at once.
  system.facts.address_limit = 3 * kGiB + 128 * kMiB;
  const auto limit = system.limit();
  CHECK(limit.source == LimitSource::available);
  system.available(64 * kGiB);
  CHECK(system.limit().limit_bytes == 4 * kGiB + 64 * kMiB);
}

TEST_CASE("ranks share what is free, but not their address spaces", "[memory]") {
  MadeUpSystem system;
  system.available(16 * kGiB);
  system.facts.processes = 4;
  CHECK(system.limit().free_bytes == 4 * kGiB);
  system.facts.address_limit = 5 * kGiB;
  CHECK(system.limit().free_bytes == 2 * kGiB);
}

TEST_CASE("the margin is a twentieth, at least 64 MiB, at most a half", "[memory]") {
  MadeUpSystem system;
  const auto margin = [&](int64_t available) {
    system.available(available);
    return system.limit().margin_bytes;
  };
  CHECK(margin(40 * kGiB) == 2 * kGiB);
  CHECK(margin(kGiB) == 64 * kMiB);
  CHECK(margin(100 * kMiB) == 50 * kMiB);
  CHECK(margin(0) == 0);
}

TEST_CASE("a system that states nothing is an error with a remedy", "[memory]") {
  const MadeUpSystem system;
  CHECK_THROWS_AS(system.limit(), c10::NotImplementedError);
  CHECK_THROWS_WITH(system.limit(), Catch::Contains("give set_limit a number of bytes"));
}

TEST_CASE("set_limit_auto sets this process's limit", "[memory]") {
  memory::set_limit(kCpu, std::nullopt);
  const auto limit = memory::set_limit_auto(kCpu);
  CHECK(limit.limit_bytes > 0);
  CHECK(memory::stats(kCpu).limit_bytes == limit.limit_bytes);
  memory::set_limit(kCpu, std::nullopt);
  const std::map<std::string, const char*> variables{{"LOCAL_WORLD_SIZE", "1000000"}};
  const brimful::test::ScopedEnv ranks(variables);
  CHECK(memory::system_limit().free_bytes < limit.free_bytes / 1000);
  for (const char* device : {"cuda:0", "meta"}) {
    CHECK_THROWS_AS(memory::set_limit_auto(c10::Device(device)), c10::ValueError);
    CHECK_THROWS_WITH(memory::set_limit_auto(c10::Device(device)),
                      Catch::Contains(std::string("(device: ") + device + "); pass a number"));
  }
  CHECK(memory::stats(kCpu).limit_bytes == std::nullopt);
}

}  // namespace test_system_limit
