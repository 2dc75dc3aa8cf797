// An allocator as programs give one to torch.cuda.memory.CUDAPluggableAllocator: each request is one of the driver's.
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <atomic>

namespace {
std::atomic<long> requests{0};
}  // namespace

extern "C" {

long pluggable_requests() {
  return requests.load();
}

void* pluggable_allocate(ssize_t bytes, int device, cudaStream_t /*stream*/) {
  ++requests;
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device);
  void* block = nullptr;
  const auto status = bytes > 0 ? cudaMalloc(&block, static_cast<size_t>(bytes)) : cudaSuccess;
  cudaSetDevice(before);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    TORCH_CHECK_WITH(OutOfMemoryError, false, "this allocator has no ", bytes, " bytes");
  }
  return block;
}

void pluggable_free(void* block, ssize_t /*bytes*/, int /*device*/, cudaStream_t /*stream*/) {
  cudaFree(block);
}

}  // extern "C"
