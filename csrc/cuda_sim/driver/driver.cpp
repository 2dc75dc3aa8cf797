// The few functions of the driver that torch asks for by way of libcaffe2_nvrtc.so. Who asks for a driver itself (CUPTI,
// cuBLAS) learns from cuInit that there is no device.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "../runtime/sim_cuda.h"
#include "made_up_module.h"

extern "C" {

CUresult cuInit(unsigned /*flags*/) {
  return CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int* version) {
  *version = 13020;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

/// Both enumerations have the same numbers.
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (sim_cuda_has_arithmetic() != 0) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  const auto same = static_cast<cudaDeviceAttr>(attribute);
  return cudaDeviceGetAttribute(value, same, device) == cudaSuccess ? CUDA_SUCCESS
                                                                    : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = sim_cuda_active(device);
  return CUDA_SUCCESS;
}

// A context is its device's number plus one.
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(static_cast<intptr_t>(device) + 1);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  int device = 0;
  cudaGetDevice(&device);
  *context = nullptr;
  return sim_cuda_active(device) != 0 ? cuDevicePrimaryCtxRetain(context, device) : CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  if (context != nullptr) {
    cudaSetDevice(static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1);
  }
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error == CUDA_ERROR_NO_BINARY_FOR_GPU ? sim::kNoModules
                                                : "not supported by the simulated driver";
  return CUDA_SUCCESS;
}
}

// cuda.h declares these with their arguments, so they are defined under other names.
#define SIM_ABSENT(name)                              \
  extern "C" CUresult sim_absent_##name() asm(#name); \
  CUresult sim_absent_##name() {                      \
    return CUDA_ERROR_NOT_SUPPORTED;                  \
  }
SIM_ABSENT(cuCtxGetDevice)
SIM_ABSENT(cuCtxGetLimit)
SIM_ABSENT(cuCtxSetLimit)
SIM_ABSENT(cuGetExportTable)
SIM_ABSENT(cuLaunchKernelEx)
SIM_ABSENT(cuLinkAddData_v2)
SIM_ABSENT(cuLinkComplete)
SIM_ABSENT(cuLinkCreate_v2)
SIM_ABSENT(cuMemGetAddressRange_v2)
SIM_ABSENT(cuModuleGetGlobal_v2)
SIM_ABSENT(cuPointerGetAttribute)
SIM_ABSENT(cuPointerGetAttributes)
SIM_ABSENT(cuStreamIsCapturing)
SIM_ABSENT(cuStreamWaitValue32_v2)
SIM_ABSENT(cuStreamWriteValue32_v2)
SIM_ABSENT(cuTensorMapEncodeIm2col)
SIM_ABSENT(cuTensorMapEncodeTiled)
