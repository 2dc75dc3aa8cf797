// The few functions of the driver that torch asks for by way of libcaffe2_nvrtc.so. Who asks for a driver itself (CUPTI,
// cuBLAS) is told by cuInit that there is no device.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

extern "C" {

int sim_cuda_active(int device);

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

CUresult cuGetErrorString(CUresult /*error*/, const char** text) {
  *text = "not supported by the simulated driver";
  return CUDA_SUCCESS;
}
}

// cuda.h declares these with their arguments, so they are defined under other names.
#define SIM_ABSENT(name)                              \
  extern "C" CUresult sim_absent_##name() asm(#name); \
  CUresult sim_absent_##name() {                      \
    return CUDA_ERROR_NOT_SUPPORTED;                  \
  }
SIM_ABSENT(cuGetExportTable)
SIM_ABSENT(cuDeviceGetAttribute)
SIM_ABSENT(cuFuncGetAttribute)
SIM_ABSENT(cuFuncSetAttribute)
SIM_ABSENT(cuFuncSetCacheConfig)
SIM_ABSENT(cuLaunchCooperativeKernel)
SIM_ABSENT(cuLaunchKernel)
SIM_ABSENT(cuLaunchKernelEx)
SIM_ABSENT(cuLinkAddData_v2)
SIM_ABSENT(cuLinkComplete)
SIM_ABSENT(cuLinkCreate_v2)
SIM_ABSENT(cuMemGetAddressRange_v2)
SIM_ABSENT(cuModuleGetFunction)
SIM_ABSENT(cuModuleGetGlobal_v2)
SIM_ABSENT(cuModuleLoad)
SIM_ABSENT(cuModuleLoadData)
SIM_ABSENT(cuModuleLoadDataEx)
SIM_ABSENT(cuModuleUnload)
SIM_ABSENT(cuOccupancyMaxActiveBlocksPerMultiprocessor)
SIM_ABSENT(cuPointerGetAttribute)
SIM_ABSENT(cuPointerGetAttributes)
SIM_ABSENT(cuStreamWaitValue32_v2)
SIM_ABSENT(cuStreamWriteValue32_v2)
SIM_ABSENT(cuTensorMapEncodeTiled)
