// Modules with kernels, and their launches. On a device without arithmetic the modules that the simulated NVRTC makes up are
// loaded, and nothing of them is run; others are not loaded.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>

#include "../runtime/sim_cuda.h"
#include "made_up_module.h"

namespace {

char module;  // there is one, whose address stands for its functions too

CUresult load(CUmodule* out, const void* image) {
  if (sim_cuda_has_arithmetic() != 0) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (std::strncmp(static_cast<const char*>(image), sim::kMadeUpModule,
                   sizeof sim::kMadeUpModule) != 0) {
    return CUDA_ERROR_NO_BINARY_FOR_GPU;
  }
  *out = reinterpret_cast<CUmodule>(&module);
  return CUDA_SUCCESS;
}

/// What is done on a device without arithmetic, and there alone.
CUresult done() {
  return sim_cuda_has_arithmetic() != 0 ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

}  // namespace

extern "C" {

CUresult cuModuleLoadData(CUmodule* out, const void* image) {
  return load(out, image);
}

CUresult cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned /*count*/,
                            CUjit_option* /*options*/, void** /*values*/) {
  return load(out, image);
}

/// A file is never one that was made up.
CUresult cuModuleLoad(CUmodule* /*out*/, const char* /*path*/) {
  return sim_cuda_has_arithmetic() != 0 ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_NO_BINARY_FOR_GPU;
}

CUresult cuModuleUnload(CUmodule /*of*/) {
  return done();
}

CUresult cuModuleGetFunction(CUfunction* out, CUmodule /*of*/, const char* /*name*/) {
  *out = reinterpret_cast<CUfunction>(&module);
  return done();
}

CUresult cuLaunchKernel(CUfunction /*function*/, unsigned /*x*/, unsigned /*y*/, unsigned /*z*/,
                        unsigned /*threads_x*/, unsigned /*threads_y*/, unsigned /*threads_z*/,
                        unsigned /*shared*/, CUstream /*stream*/, void** /*arguments*/,
                        void** /*extra*/) {
  return done();
}

CUresult cuLaunchCooperativeKernel(CUfunction /*function*/, unsigned /*x*/, unsigned /*y*/,
                                   unsigned /*z*/, unsigned /*threads_x*/, unsigned /*threads_y*/,
                                   unsigned /*threads_z*/, unsigned /*shared*/, CUstream /*stream*/,
                                   void** /*arguments*/) {
  return done();
}

CUresult cuFuncSetAttribute(CUfunction /*function*/, CUfunction_attribute /*which*/,
                            int /*value*/) {
  return done();
}

CUresult cuFuncSetCacheConfig(CUfunction /*function*/, CUfunc_cache /*config*/) {
  return done();
}

/// As of the runtime's kernels.
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction /*function*/) {
  *value = 0;
  if (which == CU_FUNC_ATTRIBUTE_NUM_REGS) {
    *value = 32;
  } else if (which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) {
    *value = 1024;
  }
  return done();
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction /*function*/, int size,
                                                     size_t shared) {
  if (sim_cuda_has_arithmetic() != 0) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const cudaError_t error =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, &module, size, shared);
  return error == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
}
