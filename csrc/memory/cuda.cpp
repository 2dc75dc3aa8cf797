#include "memory/cuda.h"
#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>
#include <algorithm>

namespace brimful::memory {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

/// Answers only where torch's allocator is in use on the current device: asking must not make a context.
template <typename Ask>
std::optional<int64_t> of_current_device(const Ask& ask) noexcept {
  try {
    if (c10::cuda::device_count() == 0 || !caching::get()->initialized()) {
      return std::nullopt;
    }
    const auto index = c10::cuda::current_device();
    return c10::cuda::hasPrimaryContext(index) ? std::optional<int64_t>(ask(index)) : std::nullopt;
  } catch (...) {
    return std::nullopt;
  }
}

constexpr auto kAggregate = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

}  // namespace

c10::DeviceIndex checked_cuda_index(c10::Device device) {
  const auto count = c10::cuda::device_count();
  TORCH_CHECK_VALUE(count > 0, "no CUDA device is available (device: ", device,
                    "); use device cpu, or check the driver and CUDA_VISIBLE_DEVICES");
  const auto index = device.has_index() ? device.index() : c10::cuda::current_device();
  TORCH_CHECK_VALUE(index >= 0 && index < count, "there is no such CUDA device (device: ", device,
                    ", devices: ", static_cast<int>(count),
                    "); use an index below the number of devices");
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  return index;
}

CudaCounters cuda_counters(c10::DeviceIndex index) {
  const auto stats = caching::getDeviceStats(index);
  const auto& used = stats.allocated_bytes[kAggregate];
  return {used.current, used.peak, stats.reserved_bytes[kAggregate].current,
          stats.allocation[kAggregate].allocated, stats.num_ooms};
}

void cuda_lower_watermark(c10::DeviceIndex index) {
  caching::resetPeakStats(index);
}

void cuda_set_limit(c10::DeviceIndex index, std::optional<int64_t> bytes) {
  double fraction = 1;
  if (bytes) {
    const auto total_bytes = static_cast<double>(caching::get()->getMemoryInfo(index).second);
    fraction = std::min(1.0, static_cast<double>(*bytes) / total_bytes);
  }
  caching::setMemoryFraction(fraction, index);
}

void cuda_release_cached(c10::DeviceIndex index) {
  const c10::cuda::CUDAGuard guard(index);
  caching::emptyCache();
}

CudaMemory cuda_memory(c10::DeviceIndex index) {
  const auto [free_bytes, total_bytes] = caching::get()->getMemoryInfo(index);
  return {static_cast<int64_t>(free_bytes), static_cast<int64_t>(total_bytes)};
}

std::optional<int64_t> cuda_refusals() noexcept {
  return of_current_device([](c10::DeviceIndex index) {
    const auto stats = caching::getDeviceStats(index);
    return stats.num_ooms + stats.num_alloc_retries;
  });
}

std::optional<int64_t> cuda_free_bytes() noexcept {
  return of_current_device([](c10::DeviceIndex index) { return cuda_memory(index).free_bytes; });
}

}  // namespace brimful::memory
