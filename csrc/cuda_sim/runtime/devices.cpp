// Devices and what they say of themselves.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "state.h"

namespace {

constexpr int kVersion = 13020;

void load(const std::string& name) {
  Dl_info here;
  if (dladdr(reinterpret_cast<void*>(&cudaGetDeviceCount), &here) == 0) {
    return;
  }
  std::string path = here.dli_fname;
  path = path.substr(0, path.rfind('/') + 1) + name;
  if (dlopen(path.c_str(), RTLD_NOW) == nullptr) {
    std::fprintf(stderr, "simulated CUDA: %s\n", dlerror());
  }
}

/// Which torch this process has, as "2.11"; empty without torch. It is there by the first call.
std::string version_of_torch() {
  void* torch = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
  void* found = torch == nullptr ? nullptr : dlsym(torch, "aoti_torch_abi_version");
  if (found == nullptr) {
    return "";
  }
  const uint64_t packed = reinterpret_cast<uint64_t (*)()>(found)();
  return std::to_string(packed >> 56) + '.' + std::to_string(packed >> 48 & 0xff);
}

/// What lies beside this library and needs torch.
void load_operators() {
  if (sim::settings().operators) {
    load("libsim_cuda_operators.so");
  } else if (sim::settings().known_bytes > 0) {
    if (const std::string version = version_of_torch(); !version.empty()) {
      load("libsim_cuda_values-" + version + ".so");
    }
  }
}

bool exists(int device) {
  return device >= 0 && device < static_cast<int>(sim::visible_devices().size());
}

cudaDeviceProp properties_of(int device) {
  const int place = sim::visible_devices()[device] + 1;
  cudaDeviceProp p{};
  std::strcpy(p.name, "Simulated GPU");
  p.uuid.bytes[0] = static_cast<char>(place);
  p.totalGlobalMem = sim::settings().total_bytes;
  p.major = 9;
  p.sharedMemPerBlock = 48 << 10;
  p.sharedMemPerBlockOptin = 227 << 10;
  p.sharedMemPerMultiprocessor = 228 << 10;
  p.regsPerBlock = p.regsPerMultiprocessor = 65536;
  p.warpSize = 32;
  p.maxThreadsPerBlock = p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.maxThreadsPerMultiProcessor = 2048;
  p.maxBlocksPerMultiProcessor = 32;
  p.maxGridSize[0] = 2147483647;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.multiProcessorCount = 4;
  p.l2CacheSize = 1 << 20;
  p.textureAlignment = 512;
  p.pciBusID = place;
  p.unifiedAddressing = p.canMapHostMemory = p.concurrentKernels = p.streamPrioritiesSupported = 1;
  if (const auto& model = sim::settings().model) {
    sim::describe(*model, &p);
    p.totalGlobalMem = sim::settings().total_bytes;
  }
  return p;
}

/// What a device without arithmetic says, on which torch's own host code and the libraries decide; 0 for the rest.
int attribute_of(const cudaDeviceProp& p, cudaDeviceAttr attribute) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return p.maxThreadsPerMultiProcessor;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return p.maxBlocksPerMultiProcessor;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return static_cast<int>(p.sharedMemPerMultiprocessor);
    case cudaDevAttrReservedSharedMemoryPerBlock:
      return static_cast<int>(p.reservedSharedMemPerBlock);
    case cudaDevAttrMaxRegistersPerMultiprocessor:
    case cudaDevAttrMaxRegistersPerBlock:
      return p.regsPerMultiprocessor;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      return p.maxThreadsDim[0];
    case cudaDevAttrMaxBlockDimZ:
      return p.maxThreadsDim[2];
    case cudaDevAttrMaxGridDimX:
      return p.maxGridSize[0];
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return p.maxGridSize[1];
    case cudaDevAttrL2CacheSize:
      return p.l2CacheSize;
    case cudaDevAttrCooperativeLaunch:
      return p.cooperativeLaunch;
    default:
      return 0;
  }
}

}  // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  static const bool loaded = (load_operators(), true);
  static_cast<void>(loaded);
  *count = static_cast<int>(sim::visible_devices().size());
  if (const cudaError_t error = sim::enter_without_device(__func__)) {
    return error;
  }
  return *count > 0 ? cudaSuccess : sim::fail(cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t error = sim::enter_without_device(__func__)) {
    return error;
  }
  if (!exists(device)) {
    return sim::fail(cudaErrorInvalidDevice);
  }
  sim::current_device() = device;
  const std::lock_guard lock(sim::state().mutex);
  sim::state().devices[device].active = true;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = sim::current_device();
  return sim::enter_without_device(__func__);
}

cudaError_t cudaDeviceSynchronize() {
  SIM_ENTER();
  for (cudaStream_t stream : sim::streams_of(sim::current_device())) {
    stream->synchronize();
  }
  return sim::settled();
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (const cudaError_t error = sim::enter_without_device(__func__)) {
    return error;
  }
  if (!exists(device)) {
    return sim::fail(cudaErrorInvalidDevice);
  }
  *properties = properties_of(device);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (const cudaError_t error = sim::enter_without_device(__func__)) {
    return error;
  }
  if (!exists(device)) {
    return sim::fail(cudaErrorInvalidDevice);
  }
  const cudaDeviceProp p = properties_of(device);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = p.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = p.minor;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = p.multiProcessorCount;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = p.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(p.sharedMemPerBlock);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(p.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrWarpSize:
      *value = p.warpSize;
      break;
    case cudaDevAttrUnifiedAddressing:
      *value = 1;
      break;
    default:
      *value = sim::settings().arithmetic ? 0 : attribute_of(p, attribute);
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  if (!exists(device)) {
    return sim::fail(cudaErrorInvalidDevice);
  }
  std::snprintf(id, length, "0000:%02x:00.0", sim::visible_devices()[device] + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer ? 1 : 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int /*peer*/, unsigned /*flags*/) {
  return sim::enter(__func__);
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kVersion;
  return cudaSuccess;
}

cudaError_t cudaProfilerStart() {
  return cudaSuccess;
}

cudaError_t cudaProfilerStop() {
  return cudaSuccess;
}
}
