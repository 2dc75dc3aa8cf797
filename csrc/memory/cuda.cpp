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

}  // namespace brimful::memory
