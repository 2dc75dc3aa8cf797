// Copies and fills.
#include <cstring>
#include <memory>
#include <string>

#include "memory.h"

namespace {

bool pageable(const void* pointer) {
  return sim::attributes_of(pointer).type == cudaMemoryTypeUnregistered;
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t given) {
  CUstream_st* stream = sim::real(given);
  if (stream->defers() && pageable(from)) {
    // Pageable memory is read before the call returns, as by the real runtime.
    auto kept = std::make_shared<std::string>(static_cast<const char*>(from), bytes);
    stream->enqueue([=] { std::memcpy(to, kept->data(), bytes); });
  } else {
    stream->enqueue([=] { std::memmove(to, from, bytes); });
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
      std::memmove(static_cast<char*>(to) + row * to_pitch,
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
  sim::real(stream)->enqueue([=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  SIM_ENTER();
  sim::real(nullptr)->enqueue([=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}
}
