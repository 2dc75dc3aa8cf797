#include <brimful/log.h>
#include <brimful/memory/recording.h>
#include <brimful/memory/stats.h>
#include "support/catch.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <thread>

#include "base/whole_file.h"
#include "memory/event_ring.h"

namespace test_recording {

using namespace brimful::memory;

namespace {

constexpr int64_t kSmallRing = 64 << 10;  // 1365 events

c10::DataPtr take(size_t bytes) {
  return c10::GetCPUAllocator()->allocate(bytes);
}

const DeviceRecording& cpu_of(const Recording& recording) {
  REQUIRE(!recording.devices.empty());
  CHECK(recording.devices[0].device == "cpu");
  return recording.devices[0];
}

/// What is in use behind each event, beginning with what is before the first.
std::vector<int64_t> used_bytes(const DeviceRecording& device) {
  int64_t tracked = 0;
  for (size_t k = 0; k < device.standing_blocks; ++k) {
    tracked += device.blocks[k].bytes;
  }
  std::vector<int64_t> used{tracked + device.untracked_bytes};
  for (const auto& event : device.events) {
    if (event.kind != EventKind::step) {
      const int64_t bytes = device.blocks[event.block].bytes;
      tracked += event.kind == EventKind::birth ? bytes : -bytes;
    }
    used.push_back(tracked + event.untracked_bytes);
  }
  return used;
}

std::string scratch(const std::string& name) {
  return (std::filesystem::temp_directory_path() /
          ("brimful_test_" + std::to_string(getpid()) + "_" + name))
      .string();
}

struct Warnings {
  std::vector<std::string> lines;
  Warnings() {
    brimful::set_log_sink(
        [this](brimful::LogLevel, const std::string& line) { lines.push_back(line); });
  }
  ~Warnings() { brimful::set_log_sink(nullptr); }
};

Recording small_recording() {
  start_recording(kSmallRing);
  {
    const SiteScope scope("kept");
    const auto kept = take(1000);
    take(200).clear();
    mark_step();
    take(300).clear();
  }
  return stop_recording();
}

}  // namespace

TEST_CASE("A full ring keeps the newest events and counts the others", "[memory][recording]") {
  EventRing ring(3);
  const auto add = [&](int64_t bytes) {
    Event event{};
    event.bytes = bytes;
    ring.add(event);
  };
  add(1);
  add(2);
  CHECK(ring.size() == 2);
  CHECK(ring[0].bytes == 1);
  add(3);
  CHECK(ring.lost() == 0);
  add(4);
  add(5);
  CHECK(ring.size() == 3);
  CHECK(ring.lost() == 2);
  CHECK(ring[0].bytes == 3);
  CHECK(ring[2].bytes == 5);
}

TEST_CASE("A recording has births, deaths and steps in their order", "[memory][recording]") {
  const auto before = take(5000);
  const int64_t used = stats(c10::DeviceType::CPU).used_bytes;
  const auto recording = small_recording();
  const auto& cpu = cpu_of(recording);
  CHECK_FALSE(tracking());
  CHECK_FALSE(brimful::memory::recording());
  CHECK(cpu.lost_events == 0);
  CHECK(cpu.standing_blocks == 0);
  CHECK(cpu.untracked_bytes == used);
  REQUIRE(cpu.events.size() == 7);
  CHECK(used_bytes(cpu) == std::vector<int64_t>{used, used + 1000, used + 1200, used + 1000,
                                                used + 1000, used + 1300, used + 1000, used});
  CHECK(cpu.events[3].kind == EventKind::step);
  CHECK(cpu.events[3].block == 1);
  CHECK(cpu.first_step == 0);
  CHECK(cpu.peak_bytes == used + 1300);
  CHECK(to_string(recording.sites.at(cpu.blocks[0].site)) == "kept");
  CHECK(cpu.blocks[2].step == 1);
  CHECK(std::is_sorted(cpu.events.begin(), cpu.events.end(),
                       [](const auto& a, const auto& b) { return a.time_ns < b.time_ns; }));
}

TEST_CASE("What the ring lost leaves totals right", "[memory][recording]") {
  const auto before = take(777);
  start_recording(kSmallRing);
  const auto first = take(64);
  auto freed_late = take(128);
  for (int k = 0; k < 3000; ++k) {
    take(1000 + k).clear();
  }
  freed_late.clear();
  const auto last = take(1);
  const int64_t used = stats(c10::DeviceType::CPU).used_bytes;
  const auto recording = stop_recording();
  const auto& cpu = cpu_of(recording);
  CHECK(cpu.events.size() == kSmallRing / sizeof(Event));
  CHECK(cpu.lost_events == 6000 + 4 - static_cast<int64_t>(cpu.events.size()));
  const auto totals = used_bytes(cpu);
  CHECK(totals.back() == used);
  CHECK(totals.front() ==
        used - 1 + 128 +
            (cpu.events[0].kind == EventKind::death ? cpu.blocks[cpu.events[0].block].bytes : 0));
  CHECK(*std::max_element(totals.begin(), totals.end()) == cpu.peak_bytes);
}

TEST_CASE("A recording may begin while memory is tracked", "[memory][recording]") {
  start_tracking();
  auto before = take(100);
  start_recording(kSmallRing);
  before.clear();
  const auto after = take(10);
  const auto recording = stop_recording();
  CHECK(tracking());
  stop_tracking();
  const auto& cpu = cpu_of(recording);
  REQUIRE(cpu.standing_blocks == 1);
  CHECK(cpu.blocks[0].bytes == 100);
  REQUIRE(cpu.events.size() == 2);
  CHECK(cpu.events[0].kind == EventKind::death);
  CHECK(cpu.events[0].block == 0);
}

TEST_CASE("Tracking that ends first leaves the recording what it has", "[memory][recording]") {
  start_tracking();
  start_recording(kSmallRing);
  const auto kept = take(100);
  stop_tracking();
  take(50).clear();
  CHECK_THROWS_AS(start_tracking(), c10::Error);
  const auto recording = stop_recording();
  const auto& cpu = cpu_of(recording);
  REQUIRE(cpu.events.size() == 1);
  CHECK(cpu.blocks[0].bytes == 100);
}

TEST_CASE("Labels name blocks that live, also from before", "[memory][recording]") {
  install();
  const auto old_weight = take(4000);
  start_recording(kSmallRing);
  const auto weight = take(400);
  const auto recording = stop_recording(
      {{weight.get(), 400, Category::parameters}, {old_weight.get(), 4000, Category::buffers}});
  const auto& cpu = cpu_of(recording);
  CHECK(cpu.blocks[0].category == Category::parameters);
  CHECK(cpu.labelled[static_cast<size_t>(Category::buffers)] == 4000);
  CHECK(cpu.labelled[static_cast<size_t>(Category::other)] == 0);
}

TEST_CASE("A recording is one at a time, and of a sensible size", "[memory][recording]") {
  CHECK_THROWS_AS(start_recording(100), c10::ValueError);
  CHECK_THROWS_AS(start_recording(-1), c10::ValueError);
  CHECK_THROWS_AS(start_recording(INT64_MAX), c10::ValueError);
  CHECK_FALSE(tracking());
  CHECK_THROWS_AS(stop_recording(), c10::Error);
  start_recording(kSmallRing);
  CHECK_THROWS_AS(start_recording(kSmallRing), c10::Error);
  CHECK_THROWS_AS(start_tracking(), c10::Error);
  take(10).clear();
  CHECK(cpu_of(stop_recording()).events.size() == 2);
}

TEST_CASE("A file gives back what was recorded", "[memory][recording]") {
  const auto path = scratch("whole");
  auto recording = small_recording();
  recording.rank = 3;
  CHECK(recording.origin.pid == getpid());
  CHECK(recording.origin.command.find("brimful_tests") != std::string::npos);
  recording.sites.push_back({"\xff<script>", -1, "f"});
  save_recording(recording, path);
  const auto loaded = load_recording(path);
  std::filesystem::remove(path);
  CHECK(loaded.rank == 3);
  CHECK(loaded.path == path);
  CHECK(to_string(loaded.origin) == to_string(recording.origin));
  CHECK(loaded.origin.unix_ns == recording.origin.unix_ns);
  CHECK(loaded.duration_ns == recording.duration_ns);
  REQUIRE(loaded.sites.size() == recording.sites.size());
  CHECK(loaded.sites.back().file == "\xef\xbf\xbd<script>");
  const auto& before = cpu_of(recording);
  const auto& after = cpu_of(loaded);
  CHECK(after.peak_bytes == before.peak_bytes);
  CHECK(after.untracked_bytes == before.untracked_bytes);
  REQUIRE(after.events.size() == before.events.size());
  REQUIRE(after.blocks.size() == before.blocks.size());
  for (size_t k = 0; k < before.events.size(); ++k) {
    CHECK(after.events[k].time_ns == before.events[k].time_ns);
    CHECK(after.events[k].kind == before.events[k].kind);
    CHECK(after.events[k].block == before.events[k].block);
    CHECK(after.events[k].untracked_bytes == before.events[k].untracked_bytes);
  }
  for (size_t k = 0; k < before.blocks.size(); ++k) {
    CHECK(after.blocks[k].address == before.blocks[k].address);
    CHECK(after.blocks[k].bytes == before.blocks[k].bytes);
    CHECK(after.blocks[k].step == before.blocks[k].step);
    CHECK(after.blocks[k].site == before.blocks[k].site);
    CHECK(after.blocks[k].phase == before.blocks[k].phase);
    CHECK(after.blocks[k].category == before.blocks[k].category);
  }
}

TEST_CASE("A file of the first format has no origin but its time", "[memory][recording]") {
  const auto path = scratch("first");
  std::string bytes = "brimful memory\n";
  bytes += std::string("\x01\x00\x02\x0a\x00\x00\x00", 7);  // rank 0 of 1, 5 ns, no site, no device
  uint64_t sum = 0xcbf29ce484222325ULL;
  for (const char byte : bytes) {
    sum = (sum ^ static_cast<uint8_t>(byte)) * 0x100000001b3ULL;
  }
  for (int k = 0; k < 8; ++k) {
    bytes.push_back(static_cast<char>(sum >> (8 * k)));
  }
  std::ofstream(path, std::ios::binary) << bytes;
  const auto loaded = load_recording(path);
  std::filesystem::remove(path);
  CHECK(loaded.ranks == 1);
  CHECK(loaded.origin.unix_ns == 5);
  CHECK(to_string(loaded.origin) == "1970-01-01 00:00:00 UTC");
}

TEST_CASE("A file that is cut off or damaged is no recording", "[memory][recording]") {
  const auto path = scratch("bad");
  save_recording(small_recording(), path);
  const auto whole = brimful::read_file(path);
  for (size_t size = 0; size < whole.size(); ++size) {
    brimful::write_file(path, whole.substr(0, size));
    CHECK_THROWS_AS(load_recording(path), c10::ValueError);
  }
  for (size_t at = 0; at < whole.size(); ++at) {
    auto damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
    brimful::write_file(path, damaged);
    CHECK_THROWS_AS(load_recording(path), c10::ValueError);
  }
  std::filesystem::remove(path);
  CHECK_THROWS_AS(load_recording(path), std::system_error);
  CHECK_THROWS_AS(load_recording("/"), std::system_error);
}

TEST_CASE("Each rank has a file of its own", "[memory][recording]") {
  CHECK(path_of_rank("a.brimful", 0, 1) == "a.brimful");
  CHECK(path_of_rank("a.brimful", 1, 2) == "a.rank1.brimful");
  CHECK(path_of_rank("x.d/.a", 1, 2) == "x.d/.a.rank1");
  CHECK(path_of_rank("x.d/a", 1, 2) == "x.d/a.rank1");
  CHECK(path_of_rank("r{rank}/{rank}.b", 12, 16) == "r12/12.b");
  CHECK(path_of_rank("r{rank}", 0, 1) == "r0");
}

TEST_CASE("A file that cannot be written is written elsewhere", "[memory][recording]") {
  const Warnings warnings;
  {
    const RecordScope scope("/nowhere/run.brimful", kSmallRing);
    take(10).clear();
  }
  CHECK_FALSE(brimful::memory::recording());
  REQUIRE(warnings.lines.size() == 1);
  const auto path = (std::filesystem::temp_directory_path() /
                     ("brimful-" + std::to_string(getpid()) + "-run.brimful"))
                        .string();
  CHECK(warnings.lines[0].find("/nowhere/run.brimful") != std::string::npos);
  CHECK(warnings.lines[0].find(path) != std::string::npos);
  CHECK(cpu_of(load_recording(path)).events.size() == 2);
  std::filesystem::remove(path);
}

TEST_CASE("Threads record at the same time", "[memory][recording]") {
  constexpr int kThreads = 8;
  constexpr int kRounds = 500;
  const int64_t used = stats(c10::DeviceType::CPU).used_bytes;
  start_recording();
  std::vector<std::thread> threads;
  for (int k = 0; k < kThreads; ++k) {
    threads.emplace_back([] {
      for (int round = 0; round < kRounds; ++round) {
        const auto a = take(100 + round);
        const auto b = take(10);
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  const auto recording = stop_recording();
  const auto& cpu = cpu_of(recording);
  CHECK(cpu.events.size() == size_t{4} * kThreads * kRounds);
  const auto totals = used_bytes(cpu);
  CHECK(totals.back() == used);
  CHECK(*std::max_element(totals.begin(), totals.end()) == cpu.peak_bytes);
  for (const auto& event : cpu.events) {
    CHECK(event.untracked_bytes == used);
  }
}

TEST_CASE("A forked child does not record, and leaves the parent's file alone",
          "[memory][recording]") {
  const auto path = scratch("fork");
  {
    const RecordScope scope(path, kSmallRing);
    const auto kept = take(10);
    const pid_t child = fork();
    if (child == 0) {
      take(20).clear();
      const bool is_off = !brimful::memory::recording() && !tracking();
      start_recording(kSmallRing);  // its own
      take(30).clear();
      const bool is_own = stop_recording().devices[0].events.size() == 2;
      _exit(is_off && is_own ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(status == 0);
    CHECK_FALSE(std::filesystem::exists(path));
  }
  CHECK(cpu_of(load_recording(path)).events.size() == 2);
  std::filesystem::remove(path);
}

}  // namespace test_recording
