#pragma once
#include <c10/core/Device.h>
#include <optional>
#include <vector>
#include "memory/caching_model.h"

/// What the model of torch's CUDA allocator begins with, read from the allocator: cuda_caching.cpp where there are CUDA
/// headers, else cuda_absent.cpp.
namespace brimful::memory {

struct CudaPool {
  std::vector<CachingSegment> segments;
  CachingSettings settings;
  CachingRoom room;

  CachingOutcome replay(const std::vector<CachingRequest>& requests,
                        std::vector<CachingMoment>* moments = nullptr) const {
    return replay_caching(segments, settings, room, requests, moments);
  }
};

/// The device's as it is; nothing where the allocator is not torch's own (cudaMallocAsync, a pluggable one). Takes the
/// allocator's lock for a while, and asks the driver.
/// @throws c10::ValueError if there is no such device here
BRIMFUL_API std::optional<CudaPool> cuda_pool(c10::Device device);

}  // namespace brimful::memory
