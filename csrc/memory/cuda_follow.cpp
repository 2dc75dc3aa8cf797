// torch's CUDA allocator reports each block under its lock: no GIL, no Python and no tensor may be touched there. It can be
// asked once to begin and never to end, so a flag ends it.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <array>
#include <atomic>
#include <limits>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include "memory/cuda.h"
#include "memory/oom_observer.h"
#include "memory/recorder.h"
#include "memory/tracker.h"

namespace brimful::memory {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using Entry = caching::TraceEntry;

struct Followed {
  std::unordered_map<size_t, Ticket> tickets;  // by address; with the lock of the device's table
  int64_t used_bytes = 0;
};

Followed& followed_of(c10::DeviceIndex index) {
  constexpr size_t kIndices = size_t{std::numeric_limits<c10::DeviceIndex>::max()} + 1;
  static auto* const all = new std::array<Followed, kIndices>;  // for ever, as what calls back
  return (*all)[static_cast<uint8_t>(index)];
}

void born(const Entry& entry) {
  const Moment moment = moment_of_birth();
  auto& table = blocks_of({c10::DeviceType::CUDA, entry.device_});
  auto& device = followed_of(entry.device_);
  const auto bytes = static_cast<int64_t>(entry.size_);
  const std::lock_guard lock(table.mutex());
  device.used_bytes += bytes;
  const auto* const data =
      reinterpret_cast<const void*>(entry.addr_);  // NOLINT(performance-no-int-to-ptr)
  device.tickets[entry.addr_] = table.born(moment, bytes, device.used_bytes, data);
}

void died(const Entry& entry) {
  auto& table = blocks_of({c10::DeviceType::CUDA, entry.device_});
  auto& device = followed_of(entry.device_);
  const std::lock_guard lock(table.mutex());
  device.used_bytes -= static_cast<int64_t>(entry.size_);
  if (const auto found = device.tickets.find(entry.addr_); found != device.tickets.end()) {
    const Ticket ticket = found->second;
    table.died(ticket, table.wants_moment_of_death(ticket) ? moment_of_death() : Moment{});
    device.tickets.erase(found);
  }
}

void on_trace(const Entry& entry) noexcept {
  if (!tracking()) {
    return;
  }
  // As torch's allocated_bytes, which a requested free leaves at once, even where a stream still uses the block.
  if (entry.action_ == Entry::ALLOC) {
    born(entry);
  } else if (entry.action_ == Entry::FREE_REQUESTED) {
    died(entry);
  }
}

/// Behind the allocator's lock. Observers cannot be taken away either; observe_oom looks whether tracking is on.
void on_out_of_memory(int64_t device, size_t bytes, size_t /*total*/, size_t /*free*/) noexcept {
  (void)observe_oom({c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)},
                    static_cast<int64_t>(bytes));
}

std::atomic<bool> is_refused{false};

bool attach() noexcept {
  try {
    caching::attachAllocatorTraceTracker(&on_trace);
    caching::attachOutOfMemoryObserver(&on_out_of_memory);
  } catch (...) {
    is_refused.store(true, std::memory_order_relaxed);
  }
  return !is_refused.load(std::memory_order_relaxed);
}

void start(c10::DeviceIndex index, uint32_t session) {
  constexpr auto kAggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const int64_t used_bytes = caching::getDeviceStats(index).requested_bytes[kAggregate].current;
  auto ring = new_ring();
  auto& table = blocks_of({c10::DeviceType::CUDA, index});
  const std::lock_guard lock(table.mutex());
  followed_of(index).tickets.clear();
  followed_of(index).used_bytes = used_bytes;
  table.start(session, used_bytes, std::move(ring));
}

}  // namespace

bool cuda_follow(uint32_t session) {
  if (!caching::get()->initialized()) {
    return false;
  }
  static const bool attached = attach();
  for (c10::DeviceIndex index = 0; attached && index < c10::cuda::device_count(); ++index) {
    start(index, session);
  }
  return true;
}

int64_t cuda_followed_bytes(c10::DeviceIndex index) {
  return followed_of(index).used_bytes;
}

std::optional<std::string> cuda_refusal() {
  static std::once_flag once;
  std::optional<std::string> refusal;
  if (is_refused.load(std::memory_order_relaxed)) {
    std::call_once(once, [&] {
      refusal =
          "this CUDA allocator does not report its blocks, so only the CPU's are tracked "
          "(allocator: " +
          caching::get()->name() +
          "); leave torch's caching allocator in place to track them (no "
          "backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF, no change_current_allocator)";
    });
  }
  return refusal;
}

}  // namespace brimful::memory
