// One watermark a device serves every peak. Whenever it is lowered (a scope opens, the peak is reset) what it had
// reached is first folded into all peaks that are still running; a peak is the larger of its folded value and the
// watermark. So the allocator keeps one maximum, however many scopes are open.
#include <brimful/memory/stats.h>
#include <c10/util/Exception.h>
#include <algorithm>
#include <array>
#include <limits>
#include <mutex>
#include <vector>
#include "memory/cpu_allocator.h"
#include "memory/cuda.h"
#include "memory/tracker.h"
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace brimful::memory {
namespace {

struct Slot {
  std::mutex mutex;
  int64_t folded_bytes = 0;
  std::optional<int64_t> limit_bytes;  // the CPU's
  std::optional<CudaLimit> cuda_limit;
  std::vector<int64_t*> scopes;  // their folded bytes
};

Slot& slot_of(c10::Device device) {
  constexpr size_t kIndices = size_t{std::numeric_limits<c10::DeviceIndex>::max()} + 1;
  static auto* const slots =
      new std::array<Slot, 1 + kIndices>;  // for ever: the allocator asks until the end
  return (*slots)[device.is_cpu() ? 0 : 1 + static_cast<size_t>(device.index())];
}

int64_t watermark_bytes(c10::Device device) {
  return device.is_cpu() ? BudgetAllocator::instance().watermark_bytes()
                         : cuda_counters(device.index()).watermark_bytes;
}

int64_t lower_watermark(c10::Device device) {
  if (device.is_cpu()) {
    return BudgetAllocator::instance().lower_watermark();
  }
  const auto now = cuda_counters(device.index());
  if (now.counted) {
    cuda_lower_watermark(device.index());
  }
  return now.watermark_bytes;
}

void fold(Slot& slot, c10::Device device) {
  const int64_t peak = lower_watermark(device);
  slot.folded_bytes = std::max(slot.folded_bytes, peak);
  for (int64_t* const scope : slot.scopes) {
    *scope = std::max(*scope, peak);
  }
}

CudaCounters counters(c10::Device device) {
  if (device.is_cuda()) {
    return cuda_counters(device.index());
  }
  const auto& allocator = BudgetAllocator::instance();
  const int64_t used = allocator.used_bytes();
  return {used, allocator.watermark_bytes(), used, allocator.allocations(), allocator.ooms()};
}

}  // namespace

c10::Device checked(c10::Device device) {
  if (device.is_cpu()) {
    BudgetAllocator::instance().install();
    return c10::Device(c10::DeviceType::CPU);
  }
  TORCH_CHECK_VALUE(device.is_cuda(), "memory of this device type is not counted (device: ", device,
                    "); use a cpu or a cuda device");
  return {c10::DeviceType::CUDA, checked_cuda_index(device)};
}

Stats stats(c10::Device given) {
  const auto device = checked(given);
  auto& slot = slot_of(device);
  const std::lock_guard lock(slot.mutex);
  const auto now = counters(device);
  const int64_t peak = std::max({slot.folded_bytes, now.watermark_bytes, now.used_bytes});
  const auto limit_bytes = device.is_cpu() ? slot.limit_bytes
                           : now.counted   ? cuda_limit(device.index(), slot.cuda_limit)
                                           : std::nullopt;
  return {now.used_bytes,  peak,     limit_bytes, now.reserved_bytes,
          now.allocations, now.ooms, now.counted};
}

void set_limit(c10::Device given, std::optional<int64_t> bytes) {
  const auto device = checked(given);
  TORCH_CHECK_VALUE(bytes.value_or(0) >= 0,
                    "limit must not be negative (bytes: ", bytes.value_or(0),
                    "); None (C++: std::nullopt) removes the limit");
  auto& slot = slot_of(device);
  const std::lock_guard lock(slot.mutex);
  if (device.is_cpu()) {
    BudgetAllocator::instance().set_limit_bytes(bytes.value_or(BudgetAllocator::kNoLimit));
    slot.limit_bytes = bytes;
  } else {
    cuda_set_limit(device.index(), bytes, slot.cuda_limit);
  }
}

std::optional<int64_t> capacity_bytes(c10::Device given) {
  const auto device = checked(given);
  const auto now = stats(device);
  if (device.is_cpu() || !now.counted) {
    return now.limit_bytes;
  }
  const auto there_is = cuda_memory(device.index()).free_bytes + now.reserved_bytes;
  return std::min(there_is, now.limit_bytes.value_or(there_is));
}

void reset_peak(c10::Device given) {
  const auto device = checked(given);
  auto& slot = slot_of(device);
  const std::lock_guard lock(slot.mutex);
  fold(slot, device);
  slot.folded_bytes = 0;
  reset_tracked_peak(device);
}

void release_cached(c10::Device given) {
  const auto device = checked(given);
  if (device.is_cuda()) {
    cuda_release_cached(device.index());
    return;
  }
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

void install() {
  BudgetAllocator::instance().install();
}

PeakScope::PeakScope(c10::Device device) : device_(checked(device)) {
  auto& slot = slot_of(device_);
  const std::lock_guard lock(slot.mutex);
  fold(slot, device_);
  slot.scopes.push_back(&folded_bytes_);
}

PeakScope::~PeakScope() {
  auto& slot = slot_of(device_);
  const std::lock_guard lock(slot.mutex);
  std::erase(slot.scopes, &folded_bytes_);
}

int64_t PeakScope::peak_bytes() const {
  auto& slot = slot_of(device_);
  const std::lock_guard lock(slot.mutex);
  return std::max(folded_bytes_, watermark_bytes(device_));
}

}  // namespace brimful::memory
