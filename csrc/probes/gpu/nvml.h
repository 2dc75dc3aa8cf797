#pragma once
#include <dlfcn.h>
#include <cstdint>
#include <initializer_list>
#include <string>

/// The part of NVML that is used here: numbers and structs as its documentation states them
/// (https://docs.nvidia.com/deploy/nvml-api), so that nothing of NVIDIA's is needed to build.
namespace brimful::probes::nvml {

using Device = void*;

enum Status : int {
  kOk = 0,
  kUninitialized = 1,
  kNotSupported = 3,
  kNoPermission = 4,
  kNotFound = 6,
  kInsufficientSize = 7,
  kDriverNotLoaded = 9,
  kTimeout = 10,
  kFunctionNotFound = 13,
  kGpuIsLost = 15,
  kResetRequired = 16,
  kVersionMismatch = 18,
  kUnknown = 999,
};
/// As text; "NVML error 42" for others.
std::string to_string(Status status);

struct Memory {
  uint64_t total, free, used;
};
struct MemoryV2 {
  uint32_t version;
  uint64_t total, reserved, free, used;
};
constexpr uint32_t kMemoryV2 = sizeof(MemoryV2) | 2U << 24;
struct Utilization {
  uint32_t gpu, memory;
};
struct ProcessV1 {
  uint32_t pid;
  uint64_t used;
};
struct ProcessV2 {  // of the functions _v2 and _v3
  uint32_t pid;
  uint64_t used;
  uint32_t gpu_instance, compute_instance;
};
constexpr uint64_t kNotAvailable = ~uint64_t{0};
constexpr int kTemperatureOfGpu = 0;
constexpr uint32_t kTextSize = 96;

/// An open libnvidia-ml.so.1. A name that a driver lacks is a status, not a crash.
class Library {
 public:
  /// @throws std::runtime_error with the reason if there is no such library
  explicit Library(const std::string& path);
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  /// Calls the first of `names` that the library has; the newest come first. Their prototype is Status(Args...).
  template <typename... Args>
  Status call(std::initializer_list<const char*> names, Args... args) const {
    for (const char* name : names) {
      if (void* symbol = dlsym(handle_, name)) {
        return reinterpret_cast<Status (*)(Args...)>(symbol)(args...);
      }
    }
    return kFunctionNotFound;
  }
  template <typename... Args>
  Status call(const char* name, Args... args) const {
    return call({name}, args...);
  }

 private:
  void* handle_;
};

}  // namespace brimful::probes::nvml
