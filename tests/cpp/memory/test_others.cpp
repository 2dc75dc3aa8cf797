#include <stdlib.h>
#include <filesystem>
#include <fstream>
#include <string>
#include "memory/others.h"
#include "support/catch.h"

namespace test_others {

namespace memory = brimful::memory;

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

/// A root folder with files of one's own, gone with it: 900 MiB of 1000 in use, 300 of them this process's.
class MadeUpSystem {
 public:
  MadeUpSystem() {
    root = (std::filesystem::temp_directory_path() / "brimful_XXXXXX").string();
    REQUIRE(mkdtemp(root.data()) != nullptr);
    write("/proc/self/status", "VmSize:\t 999999 kB\nVmRSS:\t 512000 kB\nRssAnon:\t 307200 kB\n");
    write("/proc/meminfo", "MemTotal:  1024000 kB\nMemFree: 1 kB\nMemAvailable:  102400 kB\n");
  }
  ~MadeUpSystem() { std::filesystem::remove_all(root); }
  MadeUpSystem(const MadeUpSystem&) = delete;
  MadeUpSystem& operator=(const MadeUpSystem&) = delete;

  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(root + path).parent_path());
    std::ofstream(root + path) << text;
  }
  void cgroup(int64_t max, int64_t current) const {
    write("/proc/self/cgroup", "0::/job\n");
    write("/proc/self/mountinfo",
          "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
    write("/sys/fs/cgroup/job/memory.max", std::to_string(max) + "\n");
    write("/sys/fs/cgroup/job/memory.current", std::to_string(current) + "\n");
    write("/sys/fs/cgroup/job/memory.stat", "inactive_file 0\n");
  }

  std::string root;
};

}  // namespace

TEST_CASE("What others hold of the system's memory is reported apart", "[memory]") {
  const MadeUpSystem system;
  const auto held = memory::held_by_others_under(system.root, 120 * kMiB);
  CHECK(held.process_bytes == 180 * kMiB);
  CHECK(held.others_bytes == 600 * kMiB);
  CHECK(held.free_bytes == 100 * kMiB);
  CHECK(held.where == "/proc/meminfo");
  // Tensors that were never written to are not resident.
  CHECK(memory::held_by_others_under(system.root, 400 * kMiB).process_bytes == 0);
}

TEST_CASE("A cgroup with less room than the system counts instead", "[memory]") {
  const MadeUpSystem system;
  system.cgroup(450 * kMiB, 400 * kMiB);
  const auto held = memory::held_by_others_under(system.root, 0);
  CHECK(held.others_bytes == 100 * kMiB);
  CHECK(held.free_bytes == 50 * kMiB);
  CHECK(held.where == "/sys/fs/cgroup/job/memory.max");
  system.cgroup(1000 * kMiB, 400 * kMiB);
  CHECK(memory::held_by_others_under(system.root, 0).where == "/proc/meminfo");
}

TEST_CASE("A system that says nothing holds nothing that is known", "[memory]") {
  const auto held = memory::held_by_others_under("/there/is/no/such/folder", 0);
  CHECK_FALSE(held.process_bytes);
  CHECK_FALSE(held.others_bytes);
  CHECK_FALSE(held.free_bytes);
  CHECK(held.where.empty());
}

TEST_CASE("Of this machine something is known", "[memory]") {
  const auto held = memory::held_by_others(c10::Device(c10::DeviceType::CPU));
  CHECK(held.process_bytes.value_or(0) > kMiB);
  CHECK(held.others_bytes.value_or(-1) >= 0);
}

}  // namespace test_others
