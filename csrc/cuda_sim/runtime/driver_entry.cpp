// The driver's functions, as the runtime hands them out.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>

#include "virtual_memory.h"

namespace {

CUresult not_supported() {
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult error_string(CUresult /*error*/, const char** text) {
  *text = "not supported by the simulated driver";
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function,
                                             unsigned /*version*/, unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = sim::virtual_memory_function(symbol);
  if (*function == nullptr) {
    *function = std::strcmp(symbol, "cuGetErrorString") == 0
                    ? reinterpret_cast<void*>(&error_string)
                    : reinterpret_cast<void*>(&not_supported);
  }
  if (result != nullptr) {
    *result = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}
}
