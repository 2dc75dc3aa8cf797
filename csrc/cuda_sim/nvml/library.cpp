// The library's life: its start, its devices, its end. FAKE_NVML names the scenario and is read at every call. Built with
// FAKE_NVML_OLD it lacks the functions of newer drivers.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fake.h"

namespace fake_nvml {
namespace {

constexpr int kMostGpus = 64;
pid_t initialized_by = 0;
int starts = 0;

int start() {
  const auto name = scenario();
  if (name == "init_failed" || name == "driver_gone") {
    return kDriverNotLoaded;
  }
  if (name == "mismatch") {
    return kVersionMismatch;
  }
  starts = initialized() ? starts + 1 : 1;
  initialized_by = getpid();
  return kOk;
}

// As of NVML's own, the library lives until each start has its end.
int end() {
  if (!initialized()) {
    return kUninitialized;
  }
  if (--starts == 0) {
    initialized_by = 0;
  }
  return kOk;
}

int count(unsigned* number) {
  if (scenario() == "driver_gone") {
    initialized_by = 0;  // and is not back before the next nvmlInit
  }
  if (!initialized()) {
    return kUninitialized;
  }
  *number = static_cast<unsigned>(gpu_count());
  return kOk;
}

}  // namespace

std::string scenario() {
  const char* name = std::getenv("FAKE_NVML");
  if (name != nullptr) {
    return name;
  }
  return has_simulated_devices() ? "simulated" : "healthy";
}

bool initialized() {
  return initialized_by == getpid();
}

int gpu_count() {
  const auto name = scenario();
  if (name == "simulated") {
    return simulated_count();
  }
  return name == "zero" ? 0 : 2;
}

Device of(void* device) {
  return *static_cast<Device*>(device);
}

int handle_of(int gpu, void** device) {
  static Device gpus[kMostGpus];
  const int most = scenario() == "simulated" ? simulated_count() : 2;
  if (gpu < 0 || gpu >= most || gpu >= kMostGpus) {
    return kInvalidArgument;
  }
  if (scenario() == "lost_handle" && gpu == 0) {
    return kGpuIsLost;
  }
  gpus[gpu] = {gpu, -1};
  *device = &gpus[gpu];
  return kOk;
}

int put(const std::string& text, char* out, unsigned size) {
  if (scenario() == "long_names") {
    memset(out, 'x', size);  // no end
    return kOk;
  }
  snprintf(out, size, "%s", text.c_str());
  return kOk;
}

}  // namespace fake_nvml

extern "C" {

#ifdef FAKE_NVML_OLD
int nvmlInit() {
  return fake_nvml::start();
}
int nvmlDeviceGetCount(unsigned* number) {
  return fake_nvml::count(number);
}
int nvmlDeviceGetHandleByIndex(unsigned index, void** device) {
  return fake_nvml::handle_of(static_cast<int>(index), device);
}
#else
int nvmlInit_v2() {
  return fake_nvml::start();
}
int nvmlDeviceGetCount_v2(unsigned* number) {
  return fake_nvml::count(number);
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  return fake_nvml::handle_of(static_cast<int>(index), device);
}
// A GPU's bus is its number plus one.
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  const char* bus = std::strchr(id, ':');
  if (bus == nullptr) {
    return fake_nvml::kInvalidArgument;
  }
  const int found =
      fake_nvml::handle_of(static_cast<int>(std::strtol(bus + 1, nullptr, 16)) - 1, device);
  return found == fake_nvml::kInvalidArgument ? fake_nvml::kNotFound : found;
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13020;
  return fake_nvml::kOk;
}
#endif

int nvmlShutdown() {
  return fake_nvml::end();
}
int nvmlSystemGetDriverVersion(char* out, unsigned size) {
  return fake_nvml::put("570.86.10", out, size);
}
}
