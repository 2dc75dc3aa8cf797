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
#include <array>
#include <atomic>
#include <limits>
#include <mutex>

namespace brimful::memory {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
constexpr size_t kIndices = size_t{std::numeric_limits<c10::DeviceIndex>::max()} + 1;

/// Nothing from an allocator that keeps no statistics, as those of CUDAPluggableAllocator, which throw where they are asked.
std::optional<c10::CachingDeviceAllocator::DeviceStats> device_stats(c10::DeviceIndex index) {
  static std::atomic<caching::CUDAAllocator*> keeps_none{
      nullptr};  // asked once: throwing takes long
  auto* const allocator = caching::get();
  if (allocator == keeps_none.load(std::memory_order_relaxed)) {
    return std::nullopt;
  }
  try {
    return allocator->getDeviceStats(index);
  } catch (const c10::AcceleratorError&) {  // of the device, not of the allocator
    throw;
  } catch (const c10::Error&) {
    keeps_none.store(allocator, std::memory_order_relaxed);
    return std::nullopt;
  }
}

/// Answers only where torch's allocator is in use on the device, by default the current one: asking must not make a context.
template <typename Ask>
std::optional<int64_t> of_device(MaybeDevice device, const Ask& ask) noexcept {
  try {
    if (!caching::get()
             ->initialized()) {  // asked first: counting devices fixes CUDA_VISIBLE_DEVICES
      return std::nullopt;
    }
    const auto index =
        device && device->has_index() ? device->index() : c10::cuda::current_device();
    return c10::cuda::hasPrimaryContext(index) ? std::optional<int64_t>(ask(index)) : std::nullopt;
  } catch (...) {
    return std::nullopt;
  }
}

/// The driver's answer takes a call of it, and does not change.
double total_bytes_of(c10::DeviceIndex index) {
  static std::array<std::atomic<int64_t>, kIndices> known{};
  auto& total = known[static_cast<unsigned char>(index)];
  if (total.load(std::memory_order_relaxed) == 0) {
    total.store(cuda_memory(index).total_bytes, std::memory_order_relaxed);
  }
  return static_cast<double>(total.load(std::memory_order_relaxed));
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
  const auto stats = device_stats(index);
  if (!stats) {
    return {0, 0, 0, 0, 0, /*counted=*/false};
  }
  const auto& used = stats->allocated_bytes[kAggregate];
  return {used.current, used.peak, stats->reserved_bytes[kAggregate].current,
          stats->allocation[kAggregate].allocated, stats->num_ooms};
}

void cuda_lower_watermark(c10::DeviceIndex index) {
  caching::resetPeakStats(index);
}

void cuda_set_limit(c10::DeviceIndex index, std::optional<int64_t> bytes,
                    std::optional<CudaLimit>& limit) {
  if (!device_stats(index)) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !bytes, "this CUDA allocator takes no limit (allocator: ", caching::get()->name(),
        ", bytes: ", bytes.value_or(0),
        "); give it one by its own means, or leave torch's caching allocator in place");
    return;
  }
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
  const double wanted = std::min(1.0, static_cast<double>(*bytes) / total_bytes_of(index));
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
  return static_cast<int64_t>(fraction * total_bytes_of(index));
}

void cuda_release_cached(c10::DeviceIndex index) {
  const c10::cuda::CUDAGuard guard(index);
  caching::emptyCache();
}

CudaMemory cuda_memory(c10::DeviceIndex index) {
  const auto [free_bytes, total_bytes] = caching::get()->getMemoryInfo(index);
  return {static_cast<int64_t>(free_bytes), static_cast<int64_t>(total_bytes)};
}

std::optional<int64_t> cuda_refusals(MaybeDevice device) noexcept {
  return of_device(device, [](c10::DeviceIndex index) {
    const auto stats = device_stats(index);
    return stats ? stats->num_ooms + stats->num_alloc_retries : 0;
  });
}

std::optional<int64_t> cuda_free_bytes(MaybeDevice device) noexcept {
  return of_device(device, [](c10::DeviceIndex index) { return cuda_memory(index).free_bytes; });
}

std::optional<int64_t> cuda_recent_free_bytes() noexcept {
  struct Known {
    int64_t reserved_bytes = -1;
    int64_t free_bytes = 0;
    int left = 0;  // times that it is returned without a call
  };
  static std::array<Known, kIndices> all;
  static std::mutex mutex;
  return of_device({}, [](c10::DeviceIndex index) {
    constexpr int kRepeats = 63;
    const int64_t reserved_bytes = cuda_counters(index).reserved_bytes;
    const std::lock_guard lock(mutex);
    auto& known = all[static_cast<unsigned char>(index)];
    if (reserved_bytes != known.reserved_bytes || known.left-- == 0) {
      known = {reserved_bytes, cuda_memory(index).free_bytes, kRepeats};
    }
    return known.free_bytes;
  });
}

std::optional<int> cuda_compute_major() noexcept {
  int major = 0;
  const auto asked = of_device({}, [&](c10::DeviceIndex index) {
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index));
    return index;
  });
  return asked ? std::optional(major) : std::nullopt;
}

std::vector<CudaSegment> cuda_segments(c10::DeviceIndex index) {
  std::vector<CudaSegment> segments;
  if (!device_stats(index)) {
    return segments;
  }
  const auto snapshot = caching::snapshot({0, 0}, /*include_traces=*/false);
  for (const auto& segment : snapshot.segments) {
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

std::optional<bool> cuda_is_capturing(c10::Device device) noexcept {
  try {
    if (!caching::get()->initialized()) {
      return false;
    }
    const c10::cuda::CUDAGuard guard(device);
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
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
  const bool in_use = of_device({}, [](c10::DeviceIndex index) { return index; }).has_value();
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
