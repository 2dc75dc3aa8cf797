// The driver's virtual memory, of which torch makes expandable segments: addresses are reserved, memory of a device is made
// and mapped there. A piece of memory counts for its device from cuMemCreate to cuMemRelease and its last unmapping.
#include "virtual_memory.h"

#include <cuda.h>
#include <sys/mman.h>

#include <cstring>
#include <map>

#include "known.h"
#include "memory.h"

namespace {

constexpr size_t kGranularity = size_t{2} << 20;

struct Piece {
  size_t bytes;
  int device;
  int holders;  // its handle and its mappings
};

struct Mapped {
  CUmemGenericAllocationHandle handle;
  size_t bytes;
};

struct Tables {
  std::mutex mutex;
  CUmemGenericAllocationHandle last = 0;
  std::map<CUmemGenericAllocationHandle, Piece> pieces;
  std::map<CUdeviceptr, Mapped> mapped;
};

Tables& tables() {
  static auto* all = new Tables;
  return *all;
}

/// With the lock.
void let_go(CUmemGenericAllocationHandle handle) {
  Piece& piece = tables().pieces.at(handle);
  if (--piece.holders == 0) {
    sim::give_back(piece.device, piece.bytes);
    tables().pieces.erase(handle);
  }
}

void* place(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);
}

CUresult get_granularity(size_t* bytes, const CUmemAllocationProp* /*properties*/,
                         CUmemAllocationGranularity_flags /*option*/) {
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}

CUresult reserve(CUdeviceptr* out, size_t bytes, size_t /*alignment*/, CUdeviceptr /*wish*/,
                 unsigned long long /*flags*/) {
  void* found = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *out = reinterpret_cast<CUdeviceptr>(found);
  return CUDA_SUCCESS;
}

CUresult free_addresses(CUdeviceptr address, size_t bytes) {
  return munmap(place(address), bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult create(CUmemGenericAllocationHandle* out, size_t bytes,
                const CUmemAllocationProp* properties, unsigned long long /*flags*/) {
  const int device = properties->location.id;
  if (!sim::take(device, bytes)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  const std::lock_guard lock(tables().mutex);
  *out = ++tables().last;
  tables().pieces[*out] = {bytes, device, 1};
  return CUDA_SUCCESS;
}

CUresult release(CUmemGenericAllocationHandle handle) {
  const std::lock_guard lock(tables().mutex);
  let_go(handle);
  return CUDA_SUCCESS;
}

CUresult map(CUdeviceptr address, size_t bytes, size_t /*offset*/,
             CUmemGenericAllocationHandle handle, unsigned long long /*flags*/) {
  const std::lock_guard lock(tables().mutex);
  Piece& piece = tables().pieces.at(handle);
  ++piece.holders;
  tables().mapped[address] = {handle, bytes};
  sim::know_block(place(address), bytes, piece.device);
  return CUDA_SUCCESS;
}

CUresult set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* /*access*/,
                    size_t /*count*/) {
  return mprotect(place(address), bytes, sim::protection()) == 0 ? CUDA_SUCCESS
                                                                 : CUDA_ERROR_INVALID_VALUE;
}

// What lay there is gone, and reading it is a fault of the process.
CUresult unmap(CUdeviceptr address, size_t bytes) {
  const std::lock_guard lock(tables().mutex);
  auto& mapped = tables().mapped;
  for (auto at = mapped.lower_bound(address); at != mapped.end() && at->first < address + bytes;) {
    sim::forget_block(place(at->first));
    sim::forget(place(at->first), at->second.bytes);
    let_go(at->second.handle);
    at = mapped.erase(at);
  }
  void* again = mmap(place(address), bytes, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return again == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult device_get(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

/// What torch asks before it makes a segment: whether other hardware could reach it. No.
CUresult device_attribute(int* value, CUdevice_attribute /*attribute*/, CUdevice /*device*/) {
  *value = 0;
  return CUDA_SUCCESS;
}

struct Entry {
  const char* name;
  void* function;
};

template <class Function>
Entry entry(const char* name, Function* function) {
  return {name, reinterpret_cast<void*>(function)};
}

}  // namespace

namespace sim {

void* virtual_memory_function(const char* name) {
  static const Entry entries[] = {
      entry("cuDeviceGet", &device_get),
      entry("cuDeviceGetAttribute", &device_attribute),
      entry("cuMemGetAllocationGranularity", &get_granularity),
      entry("cuMemAddressReserve", &reserve),
      entry("cuMemAddressFree", &free_addresses),
      entry("cuMemCreate", &create),
      entry("cuMemRelease", &::release),
      entry("cuMemMap", &map),
      entry("cuMemSetAccess", &set_access),
      entry("cuMemUnmap", &unmap),
  };
  for (const Entry& known : entries) {
    if (std::strcmp(known.name, name) == 0) {
      return known.function;
    }
  }
  return nullptr;
}

}  // namespace sim
