#include <brimful/memory/categories.h>
#include <brimful/memory/live_table.h>
#include <brimful/memory/stats.h>
#include "support/catch.h"
#include "support/tracking.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <cxxabi.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <thread>

namespace test_live_table {

using namespace brimful::memory;
using brimful::test::Tracking;

namespace {

c10::DataPtr take(size_t bytes) {
  return c10::GetCPUAllocator()->allocate(bytes);
}

int64_t sum_of(const CategoryBytes& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

}  // namespace

TEST_CASE("A block is in the table from its birth to its death", "[memory][live]") {
  const Tracking tracking;
  auto first = take(100);
  mark_step();
  const SiteScope scope("load");
  const auto second = take(300);
  const auto blocks = live_blocks();
  REQUIRE(blocks.size() == 2);
  CHECK(blocks[0].data == first.get());
  CHECK(blocks[0].bytes == 100);
  CHECK(blocks[0].step == 0);
  CHECK(blocks[0].site == kNoSite);
  CHECK(blocks[1].step == 1);
  CHECK(to_string(site(blocks[1].site)) == "load");
  CHECK(blocks[0].birth < blocks[1].birth);
  first.clear();
  CHECK_FALSE(find_block(first.get()));
  CHECK(live_blocks().size() == 1);
  CHECK(find_block(second.get())->bytes == 300);
}

TEST_CASE("Blocks of another session leave the table alone", "[memory][live]") {
  auto before = take(10);
  auto old = c10::DataPtr();
  {
    const Tracking tracking;
    old = take(20);
  }
  const Tracking tracking;
  const auto mine = take(30);
  before.clear();
  old.clear();
  REQUIRE(live_blocks().size() == 1);
  CHECK(live_blocks()[0].bytes == 30);
}

TEST_CASE("Tracking twice is an error, ending twice is none", "[memory][live]") {
  {
    const Tracking tracking;
    CHECK_THROWS_AS(start_tracking(), c10::Error);
    CHECK(tracking_counts().births == 0);
  }
  stop_tracking();
  CHECK_FALSE(brimful::memory::tracking());
  CHECK_THROWS_AS(live_blocks(c10::Device(c10::DeviceType::Meta)), c10::ValueError);
  CHECK_THROWS_AS(site(4'000'000'000), c10::IndexError);
}

TEST_CASE("Backward has the scope and the module of its forward", "[memory][live]") {
  const Tracking tracking;
  const auto a = at::randn({16, 16}).requires_grad_();
  const auto b = at::randn({16, 16}).requires_grad_();
  at::Tensor y;
  {
    const SiteScope scope("product");
    const ModuleScope module("layer1");
    y = a.exp().mm(b);
  }
  const SiteScope scope("loop");
  y.sum().backward();
  for (const auto& leaf : {a, b}) {
    const auto block = find_block(leaf.grad().data_ptr());
    REQUIRE(block);
    CHECK(block->phase == Phase::backward);
    CHECK(site(block->site).function == "product");
    CHECK(site(block->module).function == "layer1");
  }
}

TEST_CASE("Phases follow the graph", "[memory][live]") {
  const Tracking tracking;
  const auto phase_of = [](const at::Tensor& tensor) {
    return find_block(tensor.storage().data())->phase;
  };
  const auto weight = at::randn({8, 8}).requires_grad_();
  for (int round = 0; round < 2; ++round) {
    const auto batch = at::randn({4, 8});
    CHECK(phase_of(batch) == Phase::other);
    const auto y = batch.mm(weight);
    CHECK(phase_of(y) == Phase::forward);
    y.exp().sum().backward();
    CHECK(phase_of(weight.grad()) == Phase::backward);
    const at::NoGradGuard no_grad;
    const PhaseScope scope(Phase::optimizer);
    CHECK(phase_of(weight.grad() * 2) == Phase::optimizer);
  }
}

TEST_CASE("Eight threads leave exact counts and an exact peak", "[memory][live]") {
  reset_peak(c10::DeviceType::CPU);
  const Tracking tracking;
  constexpr int kThreads = 8;
  constexpr int kRounds = 2000;
  std::vector<std::vector<c10::DataPtr>> kept(kThreads);
  std::atomic<bool> done{false};
  std::thread reader([&] {
    while (!done) {
      const auto blocks = live_blocks();
      const auto peak = peak_by_category();
      CHECK(sum_of(peak.by_category) == peak.bytes);
    }
  });
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      const SiteScope scope("thread " + std::to_string(thread));
      for (int k = 0; k < kRounds; ++k) {
        auto block = take(64 + k % 7);
        if (k % 100 == 0) {
          kept[thread].push_back(std::move(block));
        }
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  done = true;
  reader.join();
  const auto counts = tracking_counts();
  CHECK(counts.births == kThreads * kRounds);
  CHECK(counts.events == 2 * counts.births - kThreads * kRounds / 100);
  CHECK(counts.unsited == 0);
  const auto uses = live_by_site();
  REQUIRE(uses.size() == kThreads);
  for (const auto& use : uses) {
    CHECK(use.blocks == kRounds / 100);
  }
  const auto peak = peak_by_category();
  CHECK(peak.bytes == stats(c10::DeviceType::CPU).peak_bytes);
  CHECK(sum_of(peak.by_category) == peak.bytes);
}

TEST_CASE("A forked child does not track", "[memory][live]") {
  const Tracking tracking;
  auto block = take(100);
  std::atomic<bool> done{false};
  std::thread busy([&] {
    while (!done) {
      take(64);
    }
  });
  for (int k = 0; k < 10; ++k) {
    const pid_t child = fork();
    if (child == 0) {
      block.clear();
      const bool off = !brimful::memory::tracking() && live_blocks().empty();
      start_tracking();
      const auto mine = take(10);
      _exit(off && live_blocks().size() == 1 ? 0 : 1);
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
  }
  done = true;
  busy.join();
  CHECK(find_block(block.get()));
}

namespace {

// What is registered before the libraries begin, and for none of them, runs when all of them have ended.
std::atomic<bool> lingers{false};

void linger(void* /*nothing*/) {
  if (lingers) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
}

void before_the_libraries() {
  abi::__cxa_atexit(&linger, nullptr, nullptr);
}

[[gnu::section(".preinit_array"), gnu::used]] void (*const first_of_all)() = &before_the_libraries;

}  // namespace

TEST_CASE("The process ends while it tracks and its threads allocate", "[.ends]") {
  start_tracking();
  static std::atomic<int> taken{0};
  for (int thread = 0; thread < 16; ++thread) {
    std::thread([] {
      setpriority(PRIO_PROCESS, gettid(), 19);  // interrupted somewhere, they go on when main waits
      const SiteScope scope("to the end");
      while (true) {
        take(64);
        ++taken;
      }
    }).detach();
  }
  while (taken < 10000) {
    std::this_thread::yield();
  }
  lingers = true;
  std::exit(0);  // with what is static destroyed under the threads
}

TEST_CASE("A process may end while it tracks", "[memory][live]") {
  for (int k = 0; k < 5; ++k) {
    const pid_t child = fork();
    if (child == 0) {
      execl("/proc/self/exe", "brimful_tests", "[.ends]", nullptr);
      _exit(127);
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
  }
}

}  // namespace test_live_table
