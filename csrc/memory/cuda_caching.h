#pragma once
#include <c10/core/Device.h>
#include <optional>
#include <vector>
#include "memory/caching_model.h"

/// What the model of torch's CUDA allocator begins with, and what it is asked for, read from the allocator: cuda_caching.cpp and
/// cuda_trace.cpp where there are CUDA headers, else cuda_absent.cpp.
namespace brimful::memory {

struct CudaPool {
  std::vector<CachingSegment> segments;
  CachingSettings settings;
  CachingRoom room;
  uint64_t stream = 0;  ///< the caller's

  CachingOutcome replay(const std::vector<CachingRequest>& requests,
                        std::vector<CachingMoment>* moments = nullptr) const {
    return replay_caching(segments, settings, room, requests, moments);
  }
};

/// Whether there is one: torch's own allocator is in use.
BRIMFUL_API bool has_cuda_pool();
/// The device's as it is; nothing where the allocator is not torch's own (cudaMallocAsync, a pluggable one). Takes the
/// allocator's lock for a while, and asks the driver.
/// @throws c10::ValueError if there is no such device here
BRIMFUL_API std::optional<CudaPool> cuda_pool(c10::Device device);

/// What all threads ask of a device's allocator while it lives. Any number at a time.
class BRIMFUL_API CudaTraceScope {
 public:
  /// @throws c10::ValueError if there is no such device here
  explicit CudaTraceScope(c10::Device device);
  ~CudaTraceScope();
  CudaTraceScope(const CudaTraceScope&) = delete;
  CudaTraceScope& operator=(const CudaTraceScope&) = delete;

  std::vector<CachingRequest> requests() const;
  size_t size() const;
  c10::DeviceIndex index() const { return index_; }
  /// By the allocator, under its lock.
  void note(const CachingRequest& request);

 private:
  c10::DeviceIndex index_;
  std::vector<CachingRequest> requests_;  // with the lock of all scopes
};

}  // namespace brimful::memory
