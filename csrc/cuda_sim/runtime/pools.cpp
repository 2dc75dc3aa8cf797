// Memory in the order of streams (cudaMallocAsync), from one pool for each device. Freed memory goes back at once when its
// stream comes to it: a pool reserves what is used.
#include <algorithm>
#include <map>

#include "memory.h"

namespace {

struct Pool {
  size_t most = 0;
  uint64_t threshold = 0;
};

// A pool's handle is its device's number plus one.
int device_of(cudaMemPool_t pool) {
  return static_cast<int>(reinterpret_cast<intptr_t>(pool)) - 1;
}

std::map<int, Pool>& pools() {
  static auto* all = new std::map<int, Pool>;
  return *all;
}

}  // namespace

extern "C" {

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  SIM_ENTER();
  *pool = reinterpret_cast<cudaMemPool_t>(static_cast<intptr_t>(device) + 1);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t /*stream*/) {
  SIM_ENTER();
  if (const cudaError_t error = sim::allocate(out, bytes, sim::Kind::device)) {
    return error;
  }
  const std::lock_guard lock(sim::state().mutex);
  const int device = sim::current_device();
  Pool& pool = pools()[device];
  pool.most = std::max(pool.most, sim::state().devices[device].used);
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  SIM_ENTER();
  sim::real(stream)->enqueue([=] { sim::release_now(pointer); });
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  SIM_ENTER();
  const int device = device_of(pool);
  const std::lock_guard lock(sim::state().mutex);
  auto* number = static_cast<uint64_t*>(value);
  switch (attribute) {
    case cudaMemPoolAttrReservedMemCurrent:
    case cudaMemPoolAttrUsedMemCurrent:
      *number = sim::state().devices[device].used;
      return cudaSuccess;
    case cudaMemPoolAttrReservedMemHigh:
    case cudaMemPoolAttrUsedMemHigh:
      *number = pools()[device].most;
      return cudaSuccess;
    case cudaMemPoolAttrReleaseThreshold:
      *number = pools()[device].threshold;
      return cudaSuccess;
    default:
      return sim::fail(cudaErrorNotSupported);
  }
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  SIM_ENTER();
  const int device = device_of(pool);
  const std::lock_guard lock(sim::state().mutex);
  switch (attribute) {
    case cudaMemPoolAttrReservedMemHigh:
    case cudaMemPoolAttrUsedMemHigh:
      pools()[device].most = sim::state().devices[device].used;  // it may only be set to 0
      return cudaSuccess;
    case cudaMemPoolAttrReleaseThreshold:
      pools()[device].threshold = *static_cast<uint64_t*>(value);
      return cudaSuccess;
    default:
      return cudaSuccess;  // which memory may be used again, and when
  }
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t /*pool*/, const cudaMemAccessDesc* /*access*/,
                                 size_t /*count*/) {
  return sim::enter(__func__);
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t /*pool*/, size_t /*bytes*/) {
  return sim::enter(__func__);
}
}
