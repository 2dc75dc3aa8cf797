#include "memory/cuda.h"
#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>
#include <algorithm>
#include <mutex>

namespace brimful::memory {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

/// Answers only where torch's allocator is in use on the current device: asking must not make a context.
template <typename Ask>
std::optional<int64_t> of_current_device(const Ask& ask) noexcept {
  try {
    if (!caching::get()
             ->initialized()) {  // asked first: counting devices fixes CUDA_VISIBLE_DEVICES
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

void cuda_set_limit(c10::DeviceIndex index, std::optional<int64_t> bytes,
                    std::optional<CudaLimit>& limit) {
  const double fraction = caching::getMemoryFraction(index);
  const bool is_ours = limit && fraction == limit->fraction;
  if (!bytes) {
    if (is_ours) {  // else the program has set another one since
      // cudaMallocAsync's, without one, is that of 2^64 bytes, which its setter refuses.
      caching::setMemoryFraction(std::min(1.0, limit->before), index);
    }
    limit.reset();
    return;
  }
  const double before = is_ours ? limit->before : fraction;
  const auto total_bytes = static_cast<double>(cuda_memory(index).total_bytes);
  const double wanted = std::min(1.0, static_cast<double>(*bytes) / total_bytes);
  caching::setMemoryFraction(wanted, index);
  limit = CudaLimit{*bytes, caching::getMemoryFraction(index), before};
}

std::optional<int64_t> cuda_limit(c10::DeviceIndex index, const std::optional<CudaLimit>& limit) {
  const double fraction = caching::getMemoryFraction(index);
  if (limit && fraction == limit->fraction) {
    return limit->bytes;
  }
  if (fraction >= 1) {
    return std::nullopt;
  }
  return static_cast<int64_t>(fraction * static_cast<double>(cuda_memory(index).total_bytes));
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

std::optional<int> cuda_compute_major() noexcept {
  int major = 0;
  const auto asked = of_current_device([&](c10::DeviceIndex index) {
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index));
    return index;
  });
  return asked ? std::optional(major) : std::nullopt;
}

std::vector<CudaSegment> cuda_segments(c10::DeviceIndex index) {
  std::vector<CudaSegment> segments;
  for (const auto& segment : caching::snapshot().segments) {
    if (segment.device != index) {
      continue;
    }
    segments.push_back({{}, segment.is_expandable});
    size_t address = segment.address;
    for (const auto& block : segment.blocks) {
      const auto* const data =
          reinterpret_cast<const void*>(address);  // NOLINT(performance-no-int-to-ptr)
      segments.back().blocks.push_back(
          {static_cast<int64_t>(block.size), block.allocated || block.active, data});
      address += block.size;
    }
  }
  return segments;
}

std::optional<bool> cuda_is_capturing() noexcept {
  try {
    return caching::get()->initialized() &&
           c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  } catch (...) {
    return std::nullopt;
  }
}

std::vector<std::string> cuda_uuids() noexcept {
  static std::mutex mutex;
  static std::vector<std::string> known;  // asking takes milliseconds, and the answer stays
  const std::lock_guard lock(mutex);
  if (!known.empty()) {
    return known;
  }
  std::vector<std::string> uuids;
  const bool in_use = of_current_device([](c10::DeviceIndex index) { return index; }).has_value();
  for (int index = 0; in_use && index < c10::cuda::device_count(); ++index) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) {
      (void)cudaGetLastError();  // not the next caller's
      return {};
    }
    std::string digits;
    for (const char byte : properties.uuid.bytes) {
      constexpr const char* kDigits = "0123456789abcdef";
      digits += kDigits[static_cast<unsigned char>(byte) >> 4];
      digits += kDigits[static_cast<unsigned char>(byte) & 15];
    }
    uuids.push_back(digits);
  }
  return known = uuids;
}

}  // namespace brimful::memory
