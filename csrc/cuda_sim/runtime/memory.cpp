// Memory of the devices and pinned memory: blocks of host memory, counted for the device.
#include "memory.h"

#include <sys/mman.h>
#include <algorithm>
#include <cstdlib>

#include "known.h"

namespace sim {
namespace {

constexpr size_t kAlignment = 512;

size_t left_of(const Device& device) {
  const size_t total = settings().total_bytes;
  return total - std::min(total, device.used + device.others);
}

void use(Device* device, size_t bytes) {
  device->used += bytes;
  device->peak = std::max(device->peak, device->used);
}

uintptr_t number(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

size_t whole_pages(size_t bytes) {
  constexpr size_t kPage = 4096;
  return (bytes + kPage - 1) / kPage * kPage;
}

/// At ascending addresses, as a driver gives them: of equal blocks torch 2.11 takes the one with the lowest.
void* map_block(size_t bytes) {  // under the state's lock
  static uintptr_t next = uintptr_t{1} << 45;
  void* block = mmap(reinterpret_cast<void*>(next), whole_pages(bytes), protection(),
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (block == MAP_FAILED) {
    return nullptr;
  }
  next = number(block) + whole_pages(bytes);
  return block;
}

}  // namespace

int protection() {
  return settings().arithmetic ? PROT_READ | PROT_WRITE : PROT_NONE;
}

bool is_address_alone(const void* pointer) {
  return !settings().arithmetic && attributes_of(pointer).type == cudaMemoryTypeDevice;
}

cudaError_t allocate(void** out, size_t bytes, Kind kind) {
  *out = nullptr;
  if (bytes == 0) {
    return cudaSuccess;
  }
  if (bytes > size_t{1} << 48) {
    return fail(cudaErrorMemoryAllocation);
  }
  State& s = state();
  const size_t rounded = (bytes + kAlignment - 1) & ~(kAlignment - 1);
  const std::lock_guard lock(s.mutex);
  Device& device = s.devices[current_device()];
  if (kind == Kind::device && rounded > left_of(device)) {
    return fail(cudaErrorMemoryAllocation);
  }
  void* block = kind == Kind::device ? map_block(rounded) : std::aligned_alloc(kAlignment, rounded);
  if (block == nullptr) {
    return fail(cudaErrorMemoryAllocation);
  }
  if (kind == Kind::device) {
    use(&device, rounded);
  }
  s.blocks[number(block)] = {rounded, kind, current_device()};
  *out = block;
  return cudaSuccess;
}

cudaError_t release(void* pointer) {
  if (pointer == nullptr) {
    return cudaSuccess;
  }
  int device = 0;
  {
    const std::lock_guard lock(state().mutex);
    const auto found = state().blocks.find(number(pointer));
    if (found == state().blocks.end()) {
      return fail(cudaErrorInvalidValue);
    }
    device = found->second.device;
  }
  for (cudaStream_t stream : streams_of(device)) {
    stream->synchronize();
  }
  return release_now(pointer);
}

cudaError_t release_now(void* pointer) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = s.blocks.find(number(pointer));
  if (found == s.blocks.end()) {
    return fail(cudaErrorInvalidValue);
  }
  const Block block = found->second;
  s.blocks.erase(found);
  if (block.kind == Kind::device) {
    s.devices[block.device].used -= block.bytes;
    forget(pointer, block.bytes);
    munmap(pointer, whole_pages(block.bytes));
  } else if (block.kind != Kind::registered) {
    std::free(pointer);
  }
  return cudaSuccess;
}

bool take(int device, size_t bytes) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (bytes > left_of(s.devices[device])) {
    return false;
  }
  use(&s.devices[device], bytes);
  return true;
}

void give_back(int device, size_t bytes) {
  const std::lock_guard lock(state().mutex);
  state().devices[device].used -= bytes;
}

void know_block(void* pointer, size_t bytes, int device) {
  const std::lock_guard lock(state().mutex);
  state().blocks[number(pointer)] = {bytes, Kind::mapped, device};
}

void forget_block(void* pointer) {
  const std::lock_guard lock(state().mutex);
  state().blocks.erase(number(pointer));
}

cudaPointerAttributes attributes_of(const void* pointer) {
  cudaPointerAttributes found{};
  found.type = cudaMemoryTypeUnregistered;
  found.device = -1;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  auto at = s.blocks.upper_bound(number(pointer));
  if (at == s.blocks.begin()) {
    return found;
  }
  --at;
  const Block& block = at->second;
  if (number(pointer) >= at->first + block.bytes) {
    return found;
  }
  const bool on_device = block.kind == Kind::device || block.kind == Kind::mapped;
  found.type = on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  found.device = block.device;
  found.devicePointer = const_cast<void*>(pointer);
  found.hostPointer = on_device ? nullptr : const_cast<void*>(pointer);
  return found;
}

}  // namespace sim

extern "C" {

cudaError_t cudaMalloc(void** out, size_t bytes) {
  SIM_ENTER();
  return sim::allocate(out, bytes, sim::Kind::device);
}

cudaError_t cudaFree(void* pointer) {
  SIM_ENTER();
  return sim::release(pointer);
}

cudaError_t cudaMallocHost(void** out, size_t bytes) {
  SIM_ENTER();
  return sim::allocate(out, bytes, sim::Kind::host);
}

cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned /*flags*/) {
  SIM_ENTER();
  return sim::allocate(out, bytes, sim::Kind::host);
}

cudaError_t cudaFreeHost(void* pointer) {
  SIM_ENTER();
  return sim::release(pointer);
}

cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned /*flags*/) {
  SIM_ENTER();
  const std::lock_guard lock(sim::state().mutex);
  sim::state().blocks[reinterpret_cast<uintptr_t>(pointer)] = {bytes, sim::Kind::registered,
                                                               sim::current_device()};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* pointer) {
  SIM_ENTER();
  return sim::release(pointer);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  SIM_ENTER();
  const std::lock_guard lock(sim::state().mutex);
  *total = sim::settings().total_bytes;
  *free = sim::left_of(sim::state().devices[sim::current_device()]);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  SIM_ENTER();
  *attributes = sim::attributes_of(pointer);
  return cudaSuccess;
}
}
