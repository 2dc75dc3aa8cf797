// Copies and fills.
#include <cupti.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "../cupti/sim_cupti.h"
#include "known.h"
#include "memory.h"
#include "settings.h"

namespace {

bool pageable(const void* pointer) {
  return sim::attributes_of(pointer).type == cudaMemoryTypeUnregistered;
}

uint8_t memory_of(const void* pointer) {
  switch (sim::attributes_of(pointer).type) {
    case cudaMemoryTypeDevice:
      return CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
    case cudaMemoryTypeHost:
      return CUPTI_ACTIVITY_MEMORY_KIND_PINNED;
    default:
      return CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE;
  }
}

sim_cupti_copy copy_of(uint32_t call, const void* to, const void* from, size_t bytes,
                       CUstream_st* stream) {
  constexpr uint32_t kDefaultStream = 7;  // as CUPTI numbers it
  const auto streams = sim::streams_of(stream->device);
  const auto place = std::find(streams.begin(), streams.end(), stream) - streams.begin();
  const auto source = memory_of(from);
  const auto target = memory_of(to);
  const bool from_device = source == CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
  const bool to_device = target == CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
  const auto kind =
      from_device ? to_device ? CUPTI_ACTIVITY_MEMCPY_KIND_DTOD : CUPTI_ACTIVITY_MEMCPY_KIND_DTOH
      : to_device ? CUPTI_ACTIVITY_MEMCPY_KIND_HTOD
                  : CUPTI_ACTIVITY_MEMCPY_KIND_HTOH;
  return {call,
          static_cast<uint8_t>(kind),
          source,
          target,
          bytes,
          static_cast<uint32_t>(stream->device),
          kDefaultStream + static_cast<uint32_t>(place)};
}

/// What the host sends is not known by its copy alone: operators say which values are (values/).
void move_without_arithmetic(void* to, const void* from, size_t bytes) {
  const bool known = !sim::is_address_alone(from) || sim::is_known(from, bytes);
  if (!sim::is_address_alone(to)) {
    if (known) {
      std::memmove(to, from, bytes);
    } else {
      sim::read_unknown(to, from, bytes);
      std::memmove(to, from, sim::known_before(from, bytes));
    }
    return;
  }
  size_t kept = sim::is_address_alone(from) ? sim::known_before(from, bytes) : 0;
  if (kept > 0 && sim::keep(to, kept)) {
    std::memmove(to, from, kept);
  } else {
    kept = 0;
  }
  if (kept < bytes) {
    sim::forget(static_cast<char*>(to) + kept, bytes - kept);
  }
}

void move(void* to, const void* from, size_t bytes) {
  if (sim::settings().arithmetic) {
    std::memmove(to, from, bytes);
  } else {
    move_without_arithmetic(to, from, bytes);
  }
}

void fill(void* to, int value, size_t bytes) {
  if (sim::is_address_alone(to)) {
    sim::forget(to, bytes);
  } else {
    std::memset(to, value, bytes);
  }
}

/// A copy as the profiler is to see it.
cudaError_t copy_noted(uint32_t call, void* to, const void* from, size_t bytes,
                       CUstream_st* stream) {
  const auto began = sim_cupti_now();
  const auto note = copy_of(call, to, from, bytes, stream);
  const bool kept_apart = stream->defers() && pageable(from);
  auto kept = std::make_shared<std::string>();
  if (kept_apart) {
    kept->assign(static_cast<const char*>(from), bytes);
  }
  stream->enqueue([=] {
    const auto start = sim_cupti_now();
    move(to, kept_apart ? kept->data() : from, bytes);
    sim_cupti_note_copy(&note, start, sim_cupti_now());
  });
  if (pageable(to)) {
    stream->synchronize();
  }
  sim_cupti_note_call(call, CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyAsync_v3020, began);
  return cudaSuccess;
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t given) {
  CUstream_st* stream = sim::real(given);
  if (sim::is_address_alone(to)) {  // what is known follows the calls, as operators say it
    move(to, from, bytes);
    return cudaSuccess;
  }
  if (const auto call = sim_cupti_new_call()) {
    return copy_noted(call, to, from, bytes, stream);
  }
  if (stream->defers() && pageable(from)) {
    // Pageable memory is read before the call returns, as by the real runtime.
    auto kept = std::make_shared<std::string>(static_cast<const char*>(from), bytes);
    stream->enqueue([=] { move(to, kept->data(), bytes); });
  } else {
    stream->enqueue([=] { move(to, from, bytes); });
  }
  if (pageable(to)) {
    stream->synchronize();
  }
  return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind /*kind*/,
                            cudaStream_t stream) {
  SIM_ENTER();
  return copy(to, from, bytes, stream);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int /*to_device*/, const void* from, int /*from_device*/,
                                size_t bytes, cudaStream_t stream) {
  SIM_ENTER();
  return copy(to, from, bytes, stream);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind /*kind*/) {
  SIM_ENTER();
  copy(to, from, bytes, nullptr);
  sim::real(nullptr)->synchronize();
  return sim::settled();
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind /*kind*/,
                              cudaStream_t stream) {
  SIM_ENTER();
  sim::real(stream)->enqueue([=] {
    for (size_t row = 0; row < height; ++row) {
      move(static_cast<char*>(to) + row * to_pitch,
           static_cast<const char*>(from) + row * from_pitch, width);
    }
  });
  if (pageable(from) || pageable(to)) {
    sim::real(stream)->synchronize();
  }
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  SIM_ENTER();
  if (sim::is_address_alone(to)) {
    fill(to, value, bytes);
    return cudaSuccess;
  }
  sim::real(stream)->enqueue([=] { fill(to, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  SIM_ENTER();
  sim::real(nullptr)->enqueue([=] { fill(to, value, bytes); });
  return cudaSuccess;
}
}
