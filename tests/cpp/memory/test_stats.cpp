#include <ATen/core/Tensor.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/ones.h>
#include <brimful/memory/stats.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>
#include "support/catch.h"

namespace test_stats {

namespace memory = brimful::memory;

namespace {

const c10::Device kCpu(c10::DeviceType::CPU);

c10::DataPtr take(size_t bytes) {
  return c10::GetCPUAllocator()->allocate(bytes);
}

int64_t used() {
  return memory::stats(kCpu).used_bytes;
}

int64_t peak() {
  return memory::stats(kCpu).peak_bytes;
}

/// Each test starts and ends without a limit.
struct Cpu {
  Cpu() {
    memory::set_limit(kCpu, std::nullopt);
    memory::reset_peak(kCpu);
  }
  ~Cpu() { memory::set_limit(kCpu, std::nullopt); }
  int64_t before = used();
};

/// Lets threads go on together.
class Meeting {
 public:
  void wait_for(int arrivals) {
    ++arrived_;
    for (int spins = 0; arrived_ < arrivals; ++spins) {
      if (spins > 1000) {
        std::this_thread::yield();
      }
    }
  }

 private:
  std::atomic<int> arrived_{0};
};

template <typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "nothing was thrown";
}

}  // namespace

TEST_CASE("every live byte is counted, and no other", "[memory]") {
  const Cpu cpu;
  const auto allocations = memory::stats(kCpu).allocations;
  auto block = take(1000);
  CHECK(used() == cpu.before + 1000);
  CHECK(memory::stats(kCpu).reserved_bytes == used());
  CHECK(memory::stats(kCpu).allocations == allocations + 1);
  SECTION("until it is freed, on whichever thread") {
    std::thread([moved = std::move(block)]() mutable { moved.clear(); }).join();
    CHECK(used() == cpu.before);
    CHECK(peak() == cpu.before + 1000);
  }
  SECTION("peak_bytes stays until it is reset") {
    block.clear();
    CHECK(peak() == cpu.before + 1000);
    memory::reset_peak(kCpu);
    CHECK(peak() == cpu.before);
  }
}

TEST_CASE("a block looks to torch like one of its own", "[memory]") {
  const Cpu cpu;
  auto* const allocator = c10::GetCPUAllocator();
  for (const size_t bytes : {size_t{1}, size_t{63}, size_t{100}, size_t{5000}, size_t{1} << 22}) {
    const auto block = take(bytes);
    CHECK(reinterpret_cast<uintptr_t>(block.get()) % 64 == 0);
    CHECK(block.get() == block.get_context());
    CHECK(block.get_deleter() == allocator->raw_deleter());
    CHECK(block.device() == kCpu);
    std::memset(block.get(), 0x5a, bytes);
    const auto copy = allocator->clone(block.get(), bytes);
    CHECK(std::memcmp(copy.get(), block.get(), bytes) == 0);
  }
  const auto empty = take(0);
  CHECK(empty.get() == nullptr);
  CHECK(empty.get_deleter() == allocator->raw_deleter());
  void* const raw = allocator->raw_allocate(200);
  CHECK(used() == cpu.before + 200);
  allocator->raw_deallocate(raw);
  CHECK(used() == cpu.before);
}

TEST_CASE("installing again changes nothing, on any thread", "[memory]") {
  const Cpu cpu;
  auto* const allocator = c10::GetCPUAllocator();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] { memory::install(); });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  CHECK(c10::GetCPUAllocator() == allocator);
  CHECK(c10::GetDefaultCPUAllocator() != allocator);
}

TEST_CASE("blocks of torch's own allocator go back to it", "[memory]") {
  const Cpu cpu;
  auto* const former = c10::GetDefaultCPUAllocator();
  for (const size_t bytes : {size_t{1}, size_t{100}, size_t{5000}, size_t{1} << 22}) {
    // oneDNN frees through the allocator that is in place by then
    c10::GetCPUAllocator()->raw_deallocate(former->raw_allocate(bytes));
    const auto block = former->allocate(bytes);
    CHECK(used() == cpu.before);
  }
  CHECK(used() == cpu.before);
}

TEST_CASE("the limit holds to the byte", "[memory]") {
  const Cpu cpu;
  memory::set_limit(kCpu, cpu.before + 1000);
  CHECK(memory::stats(kCpu).limit_bytes == cpu.before + 1000);
  const auto ooms = memory::stats(kCpu).ooms;
  CHECK_THROWS_AS(take(1001), c10::OutOfMemoryError);
  const auto first = take(400);
  CHECK_THROWS_AS(take(601), c10::OutOfMemoryError);
  CHECK(memory::stats(kCpu).ooms == ooms + 2);
  CHECK(used() == cpu.before + 400);
  CHECK(peak() == cpu.before + 400);
  auto second = take(600);
  CHECK_THROWS_AS(take(1), c10::OutOfMemoryError);
  CHECK_NOTHROW(take(0));
  second.clear();
  CHECK_NOTHROW(take(600));
  memory::set_limit(kCpu, std::nullopt);
  CHECK_FALSE(memory::stats(kCpu).limit_bytes.has_value());
  CHECK_NOTHROW(take(100000));
}

TEST_CASE("a limit below what is in use frees nothing and refuses what follows", "[memory]") {
  const Cpu cpu;
  auto block = take(1000);
  memory::set_limit(kCpu, cpu.before + 500);
  CHECK(used() == cpu.before + 1000);
  CHECK_THROWS_AS(take(1), c10::OutOfMemoryError);
  block.clear();
  CHECK_NOTHROW(take(500));
  memory::set_limit(kCpu, 0);
  CHECK_THROWS_AS(take(1), c10::OutOfMemoryError);
}

TEST_CASE("a refusal says what was asked, the limit, the use and a remedy", "[memory]") {
  const Cpu cpu;
  memory::set_limit(kCpu, cpu.before);
  const auto message = message_of([] { take(1572864); });
  CHECK_THAT(message, Catch::StartsWith("CPU out of memory. Tried to allocate 1.5 MiB (limit: "));
  CHECK_THAT(message, Catch::Contains(", used: ") && Catch::Contains(", peak: ") &&
                          Catch::Contains("set_limit"));
}

#if !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)  // their malloc ends the process instead
TEST_CASE("what the system refuses is an OutOfMemoryError and is not counted", "[memory]") {
  const Cpu cpu;
  const auto ooms = memory::stats(kCpu).ooms;
  CHECK_THROWS_AS(take(size_t{1} << 60), c10::OutOfMemoryError);
  CHECK(memory::stats(kCpu).ooms == ooms + 1);
  CHECK(used() == cpu.before);
  CHECK(peak() == cpu.before);
}
#endif

TEST_CASE("a negative size in disguise is an error, but no shortage", "[memory]") {
  const Cpu cpu;
  CHECK_THAT(message_of([] { take(static_cast<size_t>(-8)); }), Catch::Contains("negative"));
  CHECK_THROWS_AS(take(static_cast<size_t>(-8)), c10::Error);
  CHECK(used() == cpu.before);
}

TEST_CASE("Unlimited counts and refuses nothing, on its thread only", "[memory]") {
  const Cpu cpu;
  memory::set_limit(kCpu, cpu.before);
  {
    const memory::Unlimited outer;
    { const memory::Unlimited inner; }
    const auto block = take(1000);
    CHECK(used() == cpu.before + 1000);
    CHECK(peak() == cpu.before + 1000);
    bool refused = false;
    std::thread([&refused] {
      try {
        take(1);
      } catch (const c10::OutOfMemoryError&) {
        refused = true;
      }
    }).join();
    CHECK(refused);
  }
  CHECK_THROWS_AS(take(1), c10::OutOfMemoryError);
}

TEST_CASE("UnlimitedEverywhere counts and refuses nothing on any thread", "[memory]") {
  const Cpu cpu;
  memory::set_limit(kCpu, cpu.before);
  {
    const memory::UnlimitedEverywhere outer;
    { const memory::UnlimitedEverywhere inner; }
    bool refused = false;
    std::thread([&] {
      try {
        const auto block = take(1000);
        refused = used() != cpu.before + 1000;
      } catch (const c10::OutOfMemoryError&) {
        refused = true;
      }
    }).join();
    CHECK_FALSE(refused);
  }
  CHECK_THROWS_AS(take(1), c10::OutOfMemoryError);
}

TEST_CASE("peak scopes nest, overlap and leave peak_bytes alone", "[memory]") {
  const Cpu cpu;
  take(5000);
  const auto held = take(100);
  memory::PeakScope outer(kCpu);
  CHECK(outer.peak_bytes() == cpu.before + 100);
  take(2000);
  {
    memory::PeakScope inner(kCpu);
    CHECK(inner.peak_bytes() == cpu.before + 100);
    take(700);
    CHECK(inner.peak_bytes() == cpu.before + 800);
    CHECK(outer.peak_bytes() == cpu.before + 2100);
    CHECK(peak() == cpu.before + 5000);
    take(3000);
    memory::reset_peak(kCpu);
    CHECK(peak() == cpu.before + 100);
    CHECK(inner.peak_bytes() == cpu.before + 3100);
  }
  CHECK(outer.peak_bytes() == cpu.before + 3100);
  auto first = std::make_unique<memory::PeakScope>(kCpu);
  const memory::PeakScope second(kCpu);
  first.reset();
  take(50);
  memory::reset_peak(kCpu);
  CHECK(second.peak_bytes() == cpu.before + 150);
  CHECK(outer.peak_bytes() == cpu.before + 3100);
  CHECK(peak() == cpu.before + 100);
}

TEST_CASE("concurrent threads never exceed the limit and leave nothing behind", "[memory]") {
  const Cpu cpu;
  constexpr int64_t kBudget = 64 * 1024;
  constexpr int kThreads = 8;
  memory::set_limit(kCpu, cpu.before + kBudget);
  std::atomic<int64_t> live{0};
  std::atomic<int64_t> most{0};
  std::atomic<int64_t> refused{0};
  const auto ooms = memory::stats(kCpu).ooms;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 20000; ++i) {
        const int64_t bytes = 4096 + 997 * ((i * 7 + t) % 13);
        try {
          auto block = take(static_cast<size_t>(bytes));
          const int64_t now = live.fetch_add(bytes) + bytes;
          for (int64_t seen = most; now > seen && !most.compare_exchange_weak(seen, now);) {
          }
          if (i % 4 == 0) {
            std::this_thread::yield();
          }
          live.fetch_sub(bytes);
        } catch (const c10::OutOfMemoryError&) {
          ++refused;
        }
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  CHECK(most <= kBudget);
  CHECK(peak() <= cpu.before + kBudget);
  CHECK(peak() >= cpu.before + most);
  CHECK(refused > 0);
  CHECK(memory::stats(kCpu).ooms == ooms + refused);
  CHECK(used() == cpu.before);
}

TEST_CASE("of two blocks that fit one at a time, one is given", "[memory]") {
  const Cpu cpu;
  constexpr int kRounds = 20000;
  memory::set_limit(kCpu, cpu.before + 64);
  Meeting meeting;
  std::atomic<int> given{0};
  const auto compete = [&] {
    for (int round = 0; round < kRounds; ++round) {
      c10::DataPtr block;
      meeting.wait_for(4 * round + 2);
      try {
        block = take(64);
        ++given;
      } catch (const c10::OutOfMemoryError&) {
      }
      meeting.wait_for(4 * round + 4);
    }
  };
  std::thread other(compete);
  compete();
  other.join();
  CHECK(given == kRounds);  // one a round: never both, and never none
  CHECK(used() == cpu.before);
}

TEST_CASE("blocks that two threads take at once are both in the peak", "[memory]") {
  const Cpu cpu;
  constexpr int kRounds = 20000;
  Meeting meeting;
  const auto take_one = [&meeting](int round) {
    meeting.wait_for(6 * round + 2);
    const auto block = take(64);
    meeting.wait_for(6 * round + 4);
  };
  std::thread other([&] {
    for (int round = 0; round < kRounds; ++round) {
      take_one(round);
      meeting.wait_for(6 * round + 6);
    }
  });
  int wrong = 0;
  for (int round = 0; round < kRounds; ++round) {
    take_one(round);
    meeting.wait_for(6 * round + 6);
    wrong += peak() != cpu.before + 128;
    memory::reset_peak(kCpu);
  }
  other.join();
  CHECK(wrong == 0);
}

TEST_CASE("peak scopes that open beside allocating threads miss nothing that lives on",
          "[memory]") {
  const Cpu cpu;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&stop] {
      while (!stop) {
        take(4096);
      }
    });
  }
  for (int i = 0; i < 2000; ++i) {
    const auto held = take(1 << 20);
    const memory::PeakScope scope(kCpu);
    const int64_t peak_bytes = scope.peak_bytes();
    if (peak_bytes < cpu.before + (1 << 20) || peak_bytes > cpu.before + (1 << 20) + 2 * 4096) {
      FAIL_CHECK("peak of a scope is off by " << peak_bytes - cpu.before - (1 << 20));
      break;
    }
  }
  stop = true;
  for (auto& thread : threads) {
    thread.join();
  }
  CHECK(used() == cpu.before);
}

TEST_CASE("conv2d runs, and runs out, forward and backward", "[memory]") {
  const Cpu cpu;
  {
    const auto input = at::ones({4, 3, 16, 16}).set_requires_grad(true);
    const auto weight = at::ones({8, 3, 3, 3}).set_requires_grad(true);
    at::conv2d(input, weight).sum().backward();
    CHECK(weight.grad().sum().item<float>() == Approx(8 * 3 * 9 * 4 * 14 * 14));
    weight.mutable_grad().reset();
    input.mutable_grad().reset();
    const int64_t base = used();
    SECTION("forward") {
      memory::set_limit(kCpu, base + 1000);
      CHECK_THROWS_AS(at::conv2d(input, weight), c10::OutOfMemoryError);
    }
    SECTION("backward") {
      const auto loss = at::conv2d(input, weight).sum();
      memory::set_limit(kCpu, used() + 1000);
      CHECK_THROWS_AS(loss.backward(), c10::OutOfMemoryError);
    }
  }
  CHECK(used() == cpu.before);
}

TEST_CASE("bad input is refused with its value and a remedy", "[memory]") {
  const Cpu cpu;
  memory::set_limit(kCpu, int64_t{1} << 40);
  CHECK_THROWS_AS(memory::set_limit(kCpu, -5), c10::ValueError);
  CHECK_THAT(message_of([] { memory::set_limit(kCpu, -5); }),
             Catch::StartsWith("limit must not be negative (bytes: -5); "));
  CHECK(memory::stats(kCpu).limit_bytes == int64_t{1} << 40);

  const auto device = GENERATE(as<std::string>{}, "meta", "mps", "xpu:0", "cuda:127");
  CAPTURE(device);
  const c10::Device bad(device);
  CHECK_THROWS_AS(memory::stats(bad), c10::ValueError);
  CHECK_THROWS_AS(memory::set_limit(bad, 5), c10::ValueError);
  CHECK_THROWS_AS(memory::reset_peak(bad), c10::ValueError);
  CHECK_THROWS_AS(memory::release_cached(bad), c10::ValueError);
  CHECK_THROWS_AS(memory::PeakScope(bad), c10::ValueError);
  CHECK_THAT(message_of([&] { memory::stats(bad); }), Catch::Contains("(device: " + device));
}

TEST_CASE("any CPU index is the CPU, and releasing its cache changes no count", "[memory]") {
  const Cpu cpu;
  const auto block = take(1000);
  memory::release_cached(c10::Device("cpu:0"));
  CHECK(memory::stats(c10::Device("cpu:0")).used_bytes == cpu.before + 1000);
}

}  // namespace test_stats
