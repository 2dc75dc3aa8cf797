#pragma once
#include <c10/core/Device.h>
#include <cstdint>
#include <optional>

/// CUDA's side of stats.cpp: cuda.cpp where there are CUDA headers, else cuda_absent.cpp.
namespace brimful::memory {

struct CudaCounters {
  int64_t used_bytes;
  int64_t watermark_bytes;
  int64_t reserved_bytes;
  int64_t allocations;
  int64_t ooms;
};

/// The device's index; the current device's where it has none. Readies torch's allocator.
/// @throws c10::ValueError if there is no such device here
c10::DeviceIndex checked_cuda_index(c10::Device device);
CudaCounters cuda_counters(c10::DeviceIndex index);
void cuda_lower_watermark(c10::DeviceIndex index);
void cuda_set_limit(c10::DeviceIndex index, std::optional<int64_t> bytes);
void cuda_release_cached(c10::DeviceIndex index);

struct CudaMemory {
  int64_t free_bytes;
  int64_t total_bytes;
};
/// As the driver has it, all processes together.
CudaMemory cuda_memory(c10::DeviceIndex index);

/// Of this thread's current device: how often torch's allocator refused, or gave its cache back to go on; the driver's
/// free bytes. Nothing where CUDA is not in use, or answers with an error.
std::optional<int64_t> cuda_refusals() noexcept;
std::optional<int64_t> cuda_free_bytes() noexcept;

}  // namespace brimful::memory
