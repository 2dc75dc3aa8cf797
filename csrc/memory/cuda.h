#pragma once
#include <c10/core/Device.h>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// CUDA's side of stats.cpp: cuda.cpp where there are CUDA headers, else cuda_absent.cpp.
namespace brimful::memory {

struct CudaCounters {
  int64_t used_bytes;
  int64_t watermark_bytes;
  int64_t reserved_bytes;
  int64_t allocations;
  int64_t ooms;
  bool counted = true;  // false: the allocator keeps no statistics, and the numbers are 0
};

/// The device's index; the current device's where it has none. Readies torch's allocator.
/// @throws c10::ValueError if there is no such device here
c10::DeviceIndex checked_cuda_index(c10::Device device);
CudaCounters cuda_counters(c10::DeviceIndex index);
/// Of an allocator that keeps statistics.
void cuda_lower_watermark(c10::DeviceIndex index);
/// A limit is a fraction of torch's allocator, which the program may have set before, and may set again.
struct CudaLimit {
  int64_t bytes;
  double fraction;
  double before;
};
/// Nothing: the fraction that torch's allocator had before `limit`, if no other has been set since.
/// @throws c10::NotImplementedError for a limit of an allocator that keeps no statistics
void cuda_set_limit(c10::DeviceIndex index, std::optional<int64_t> bytes,
                    std::optional<CudaLimit>& limit);
/// What torch's allocator may reserve, by `limit` or by a fraction that the program has set; nothing: all of the device.
/// Of an allocator that keeps statistics.
std::optional<int64_t> cuda_limit(c10::DeviceIndex index, const std::optional<CudaLimit>& limit);
void cuda_release_cached(c10::DeviceIndex index);

struct CudaMemory {
  int64_t free_bytes;
  int64_t total_bytes;
};
/// As the driver has it, all processes together.
CudaMemory cuda_memory(c10::DeviceIndex index);

/// Of the device, or of this thread's current one: how often torch's allocator refused, or gave its cache back to go on;
/// the driver's free bytes; its generation (9: Hopper). Nothing where CUDA is not in use, or answers with an error.
using MaybeDevice = std::optional<c10::Device>;
std::optional<int64_t> cuda_refusals(MaybeDevice device = {}) noexcept;
std::optional<int64_t> cuda_free_bytes(MaybeDevice device = {}) noexcept;
/// Of the current device, for what asks often: the driver is asked again where torch has taken memory of it or given some
/// back, and else one time in 64.
std::optional<int64_t> cuda_recent_free_bytes() noexcept;
std::optional<int> cuda_compute_major() noexcept;

/// A block of torch's CUDA allocator; those of a segment in the order of their addresses.
struct CudaBlock {
  int64_t bytes;
  bool live;
  const void* data;
};
struct CudaSegment {
  std::vector<CudaBlock> blocks;
  bool expandable;
};
/// Takes the allocator's lock for a while. None where the allocator does not report them.
std::vector<CudaSegment> cuda_segments(c10::DeviceIndex index);

/// Fills the live tables of all CUDA devices from now on; false, and nothing, while torch's allocator is not in use. One
/// thread at a time, once a session, and not after main's end.
bool cuda_follow(uint32_t session);
/// What they add up to with what was there before, as asked for (torch's requested_bytes). Needs the table's lock.
int64_t cuda_followed_bytes(c10::DeviceIndex index);
/// Once, where that allocator has no hook: a message for the user.
std::optional<std::string> cuda_refusal();

/// What torch keeps for a handle of cuBLAS or cuBLASLt and a stream, from call to call. None while torch changes them.
struct CudaWorkspace {
  const void* data;
  int64_t bytes;
};
std::vector<CudaWorkspace> cuda_workspaces(c10::Device device);

/// Whether this thread's stream of the device records a CUDA graph, in which nothing else must be enqueued; nothing where
/// the device is lost.
std::optional<bool> cuda_is_capturing(c10::Device device) noexcept;

/// The devices of this process in CUDA's order, each as the 32 hex digits of its UUID. None where CUDA is not in use.
std::vector<std::string> cuda_uuids() noexcept;

}  // namespace brimful::memory
