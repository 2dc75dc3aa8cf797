#include "memory/cpu_allocator.h"
#include <brimful/memory/fault.h>
#include <brimful/memory/stats.h>
#include <brimful/memory/trace.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <algorithm>
#include <mutex>
#include "base/format.h"
#include "memory/left_bytes.h"
#include "memory/oom_observer.h"
#include "memory/tracker.h"

namespace brimful::memory {
namespace {

// The fields come last: the 16 bytes in front of another's block are malloc's own, so looking for a seal there is safe.
struct alignas(64) Header {
  char unused[40];
  Ticket ticket;
  int64_t bytes;
  uint64_t seal;
};
static_assert(sizeof(Header) == 64);

constexpr const char* kOverLimit =
    "Use smaller batches (brimful's BatchSizer splits them, map_batches those of a validation) or "
    "raise the limit (brimful's memory.set_limit).";
constexpr const char* kNoneLeft =
    "The system has none left: use smaller batches (brimful's BatchSizer splits them, map_batches "
    "those of a validation).";

struct ThreadState {
  int64_t net_bytes = 0;
  int64_t unlimited_depth = 0;
  FaultAt* newest_fault = nullptr;
  TraceScope* newest_trace = nullptr;
};
constinit thread_local ThreadState thread_state;

uint64_t seal_of(const void* data) {
  return 0x6272696d66756c21ULL ^ reinterpret_cast<uintptr_t>(data);
}

Header* header_of(void* data) {
  return static_cast<Header*>(data) - 1;
}

__attribute__((no_sanitize("address", "thread"))) bool is_ours(void* data) {
  return header_of(data)->seal == seal_of(data);
}

}  // namespace

BudgetAllocator& BudgetAllocator::instance() {
  static auto* const allocator = new BudgetAllocator;
  return *allocator;
}

void BudgetAllocator::install() {
  static std::once_flag once;
  std::call_once(once, [this] {
    constexpr uint8_t kPriority = 100;
    former_deleter_.store(c10::GetCPUAllocator()->raw_deleter(), std::memory_order_relaxed);
    c10::SetCPUAllocator(this, kPriority);
    TORCH_CHECK(c10::GetCPUAllocator() == this,
                "another CPU allocator is in front of brimful's (priority above: ",
                static_cast<int>(kPriority), "); set it with a lower priority");
  });
}

c10::DataPtr BudgetAllocator::allocate(size_t nbytes) {
  const c10::Device cpu(c10::DeviceType::CPU);
  if (nbytes == 0) {
    return {nullptr, nullptr, &release, cpu};
  }
  const bool unlimited = thread_state.unlimited_depth > 0;
  if (thread_state.newest_fault != nullptr) [[unlikely]] {
    check_faults(nbytes, unlimited);
  }
  if (nbytes > static_cast<size_t>(kNoLimit) - sizeof(Header)) [[unlikely]] {
    c10::alloc_cpu(nbytes);  // a negative size in disguise: torch's own complaint
  }
  const auto bytes = static_cast<int64_t>(nbytes);
  auto* const header =
      static_cast<Header*>(tracking() ? take_tracked(bytes, unlimited) : take(bytes, unlimited));
  thread_state.net_bytes += bytes;
  allocations_.fetch_add(1, std::memory_order_relaxed);
  void* const data = header + 1;
  header->bytes = bytes;
  header->seal = seal_of(data);
  c10::DataPtr pointer(data, data, &release, cpu);
  c10::profiledCPUMemoryReporter().New(data, nbytes);
  if (thread_state.newest_trace != nullptr) [[unlikely]] {
    record(bytes, data);
  }
  return pointer;
}

c10::DeleterFnPtr BudgetAllocator::raw_deleter() const {
  return &release;
}

void BudgetAllocator::copy_data(void* dest, const void* src, size_t count) const {
  default_copy_data(dest, src, count);
}

void BudgetAllocator::release(void* data) {
  if (data == nullptr) {
    return;
  }
  auto& self = instance();
  if (!is_ours(data)) [[unlikely]] {
    const auto former = self.former_deleter_.load(std::memory_order_relaxed);
    (former != nullptr ? former : &c10::free_cpu)(data);
    return;
  }
  auto* const header = header_of(data);
  const int64_t bytes = header->bytes;
  header->seal = 0;
  c10::profiledCPUMemoryReporter().Delete(data);
  if (header->ticket.slot != 0 && tracking()) [[unlikely]] {
    self.give_back_tracked(header->ticket, bytes);
    c10::free_cpu(header);
  } else {
    c10::free_cpu(header);
    self.used_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
  }
  thread_state.net_bytes -= bytes;
  if (thread_state.newest_trace != nullptr) [[unlikely]] {
    record(-bytes, data);
  }
}

void BudgetAllocator::record(int64_t bytes, const void* data) {
  for (auto* scope = thread_state.newest_trace; scope != nullptr; scope = scope->outer_) {
    scope->trace_.push_back(bytes);
    scope->blocks_.push_back(reinterpret_cast<uintptr_t>(data));
  }
}

// Takes the bytes before the memory: two threads cannot both pass.
void* BudgetAllocator::take(int64_t bytes, bool unlimited) {
  const auto used = reserve(bytes, unlimited);
  if (!used) [[unlikely]] {
    refuse(bytes, kOverLimit);
  }
  void* const block = allocate_block(bytes);
  if (block == nullptr) [[unlikely]] {
    used_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
    refuse(bytes, kNoneLeft);
  }
  raise_watermark(*used);
  static_cast<Header*>(block)->ticket = {};
  return block;
}

// The memory before the bytes: the table counts and names the block in one go.
void* BudgetAllocator::take_tracked(int64_t bytes, bool unlimited) {
  void* const block = allocate_block(bytes);
  if (block == nullptr) [[unlikely]] {
    refuse(bytes, kNoneLeft);
  }
  auto* const header = static_cast<Header*>(block);
  follow_cuda();
  const Moment moment = moment_of_birth();
  std::optional<int64_t> used;
  {
    auto& table = cpu_blocks();
    const std::lock_guard lock(table.mutex());
    used = reserve(bytes, unlimited);
    if (used) {
      header->ticket = table.born(moment, bytes, *used, header + 1);
    }
  }
  if (!used) [[unlikely]] {
    c10::free_cpu(block);
    refuse(bytes, kOverLimit);
  }
  raise_watermark(*used);
  return block;
}

void BudgetAllocator::give_back_tracked(Ticket ticket, int64_t bytes) {
  auto& table = cpu_blocks();
  const std::lock_guard lock(table.mutex());
  table.died(ticket, table.wants_moment_of_death(ticket) ? moment_of_death() : Moment{});
  used_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
}

// A refused request never shows in used_bytes, so it cannot make another thread's request fail.
std::optional<int64_t> BudgetAllocator::reserve(int64_t bytes, bool unlimited) {
  const int64_t limit = limit_bytes_.load(std::memory_order_relaxed);
  if (limit == kNoLimit || unlimited || lifted_.load(std::memory_order_relaxed) > 0) {
    return used_bytes_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  }
  int64_t used = used_bytes_.load(std::memory_order_relaxed);
  do {
    if (bytes > limit - used) [[unlikely]] {
      return std::nullopt;
    }
  } while (!used_bytes_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  return used + bytes;
}

void* BudgetAllocator::allocate_block(int64_t bytes) {
  try {
    return c10::alloc_cpu(static_cast<size_t>(bytes) + sizeof(Header));
  } catch (const c10::Error&) {
    return nullptr;
  }
}

void BudgetAllocator::raise_watermark(int64_t used_bytes) {
  int64_t watermark = watermark_bytes_.load(std::memory_order_relaxed);
  while (used_bytes > watermark && !watermark_bytes_.compare_exchange_weak(
                                       watermark, used_bytes, std::memory_order_release)) {
  }
}

int64_t BudgetAllocator::lower_watermark() {
  const int64_t before = watermark_bytes_.exchange(used_bytes(), std::memory_order_acq_rel);
  raise_watermark(used_bytes());  // what others took in between
  return before;
}

void BudgetAllocator::check_faults(size_t nbytes, bool unlimited) {
  bool planted = false;
  for (FaultAt* fault = thread_state.newest_fault; fault != nullptr; fault = fault->outer_) {
    planted |= fault->count_one(unlimited);
  }
  if (planted) {
    refuse(static_cast<int64_t>(nbytes), "This is a planted fault (FaultAt).");
  }
}

void BudgetAllocator::refuse(int64_t bytes, const char* remedy) {
  ooms_.fetch_add(1, std::memory_order_relaxed);
  c10::profiledCPUMemoryReporter().OutOfMemory(static_cast<size_t>(bytes));
  const Stats now = stats(c10::Device(c10::DeviceType::CPU));
  const std::string limit = now.limit_bytes ? format_bytes(*now.limit_bytes) : "none";
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CPU out of memory. Tried to allocate ",
                   format_bytes(bytes), " (limit: ", limit,
                   ", used: ", format_bytes(now.used_bytes),
                   ", peak: ", format_bytes(now.peak_bytes), "). ", remedy,
                   observe_oom(c10::Device(c10::DeviceType::CPU), bytes));
}

int64_t LeftBytes::now() const {
  if (device_.is_cpu()) {
    return thread_state.net_bytes;
  }
  return device_.is_cuda() ? stats(device_).used_bytes : 0;
}

Unlimited::Unlimited() noexcept {
  ++thread_state.unlimited_depth;
}

Unlimited::~Unlimited() {
  --thread_state.unlimited_depth;
}

UnlimitedEverywhere::UnlimitedEverywhere() noexcept {
  BudgetAllocator::instance().lift_limit(true);
}

UnlimitedEverywhere::~UnlimitedEverywhere() {
  BudgetAllocator::instance().lift_limit(false);
}

TraceScope::TraceScope() : outer_(thread_state.newest_trace) {
  install();
  thread_state.newest_trace = this;
}

TraceScope::~TraceScope() {
  thread_state.newest_trace = outer_;
}

int64_t peak_bytes(const Trace& trace) {
  int64_t used = 0;
  int64_t peak = 0;
  for (const int64_t bytes : trace) {
    used += bytes;
    peak = std::max(peak, used);
  }
  return peak;
}

FaultAt::FaultAt(int64_t index, bool unlimited_too)
    : index_(index), unlimited_too_(unlimited_too), outer_(thread_state.newest_fault) {
  TORCH_CHECK_VALUE(index >= 0, "index must not be negative (index: ", index,
                    "); 0 is the next allocation");
  install();
  thread_state.newest_fault = this;
}

FaultAt::~FaultAt() {
  thread_state.newest_fault = outer_;
}

bool FaultAt::count_one(bool unlimited) {
  if (unlimited && !unlimited_too_) {
    return false;
  }
  const bool planted = seen_ == index_;
  ++seen_;
  fired_ |= planted;
  return planted;
}

}  // namespace brimful::memory
