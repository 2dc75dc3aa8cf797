// A libnvidia-ml.so.1 whose driver is made up: FAKE_NVML names the scenario and is read at every call. Built with
// FAKE_NVML_OLD it lacks the functions of newer drivers.
#include <unistd.h>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr int kOk = 0;
constexpr int kUninitialized = 1;
constexpr int kInvalidArgument = 2;
constexpr int kNotSupported = 3;
constexpr int kNoPermission = 4;
constexpr int kNotFound = 6;
constexpr int kInsufficientSize = 7;
constexpr int kDriverNotLoaded = 9;
constexpr int kGpuIsLost = 15;
constexpr int kVersionMismatch = 18;
constexpr int kUnknown = 999;
constexpr uint64_t kNotAvailable = ~uint64_t{0};

std::string scenario() {
  const char* name = std::getenv("FAKE_NVML");
  return name == nullptr ? "healthy" : name;
}

struct FakeDevice {
  int gpu;
  int mig;  // -1: the whole GPU
};
FakeDevice gpus[2] = {{0, -1}, {1, -1}};
FakeDevice instances[2] = {{0, 0}, {0, 2}};  // place 1 is empty

FakeDevice of(void* device) {
  return *static_cast<FakeDevice*>(device);
}

pid_t initialized_by = 0;  // as of NVML's own, a child's calls do not count
bool initialized() {
  return initialized_by == getpid();
}

/// What every call on this device answers, if not its own.
int status_of(void* device) {
  if (!initialized()) {
    return kUninitialized;
  }
  return scenario() == "lost" && of(device).gpu == 0 ? kGpuIsLost : kOk;
}

int put(const std::string& text, char* out, unsigned size) {
  if (scenario() == "long_names") {
    memset(out, 'x', size);  // no end
    return kOk;
  }
  snprintf(out, size, "%s", text.c_str());
  return kOk;
}

struct Shown {
  unsigned pid;
  uint64_t used;
};
std::vector<Shown> processes_of(const FakeDevice& device) {
  const auto me = static_cast<unsigned>(getpid());
  if (scenario() == "hidden_pids") {
    return {};
  }
  if (scenario() == "host_pids") {
    return {{me, 7 * kGiB},
            {3999999, 2 * kGiB}};  // of others, one of which happens to be called as we are
  }
  if (scenario() == "not_available") {
    return {{me, kNotAvailable}};
  }
  if (scenario() == "crowd") {
    std::vector<Shown> crowd;
    for (unsigned i = 0; i < 50; ++i) {
      crowd.push_back({3900000 + i, kMiB});
    }
    return crowd;
  }
  if (device.gpu == 1) {
    return {};
  }
  return {{me, 2 * kGiB}, {3999999, kGiB}};
}

template <typename Info>
int list(void* device, unsigned* count, Info* infos) {
  if (const int status = status_of(device)) {
    return status;
  }
  if (scenario() == "no_permission" || (scenario() == "mig" && of(device).mig < 0)) {
    return kNoPermission;
  }
  const auto found = processes_of(of(device));
  const unsigned room = *count;
  *count = static_cast<unsigned>(found.size());
  if (found.size() > room) {
    return kInsufficientSize;
  }
  for (size_t i = 0; i < found.size(); ++i) {
    infos[i].pid = found[i].pid;
    infos[i].used = found[i].used;
  }
  return kOk;
}

struct Numbers {
  uint64_t total, reserved, free, used;
};
int numbers_of(void* device, Numbers* numbers) {
  if (const int status = status_of(device)) {
    return status;
  }
  if (scenario() == "unified" || (scenario() == "mig_silent" && of(device).gpu == 0)) {
    return kNotSupported;
  }
  if (scenario() == "no_permission") {
    return kNoPermission;
  }
  const auto fake = of(device);
  if (scenario() == "unified_zero") {
    *numbers = {0, 0, 0, 0};
  } else if (scenario() == "huge") {
    *numbers = {80 * kGiB, kNotAvailable, kNotAvailable, kNotAvailable};
  } else if (fake.mig >= 0) {
    *numbers = {20 * kGiB, kGiB / 4, 17 * kGiB, 11 * kGiB / 4};
  } else {
    *numbers = {80 * kGiB, kGiB, 70 * kGiB, 9 * kGiB};
  }
  return kOk;
}

struct MemoryV1 {
  uint64_t total, free, used;
};
struct MemoryV2 {
  unsigned version;
  uint64_t total, reserved, free, used;
};
struct ProcessV1 {
  unsigned pid;
  uint64_t used;
};
struct ProcessV2 {
  unsigned pid;
  uint64_t used;
  unsigned gpu_instance, compute_instance;
};
struct Rates {
  unsigned gpu, memory;
};

int start() {
  const auto name = scenario();
  if (name == "init_failed" || name == "driver_gone") {
    return kDriverNotLoaded;
  }
  if (name == "mismatch") {
    return kVersionMismatch;
  }
  initialized_by = getpid();
  return kOk;
}

int count(unsigned* number) {
  if (scenario() == "driver_gone") {
    initialized_by = 0;  // and is not back before the next nvmlInit
  }
  if (!initialized()) {
    return kUninitialized;
  }
  *number = scenario() == "zero" ? 0 : 2;
  return kOk;
}

int handle(unsigned index, void** device) {
  if (index > 1) {
    return kInvalidArgument;
  }
  if (scenario() == "lost_handle" && index == 0) {
    return kGpuIsLost;
  }
  *device = &gpus[index];
  return kOk;
}

int unless_hidden(void* device, unsigned* out, unsigned value) {
  if (const int status = status_of(device)) {
    return status;
  }
  if (scenario() == "not_available" || (scenario() == "mig" && of(device).mig >= 0)) {
    return kNotSupported;
  }
  *out = value;
  return kOk;
}

}  // namespace

extern "C" {

#ifdef FAKE_NVML_OLD
int nvmlInit() {
  return start();
}
int nvmlDeviceGetCount(unsigned* number) {
  return count(number);
}
int nvmlDeviceGetHandleByIndex(unsigned index, void** device) {
  return handle(index, device);
}
int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* number, ProcessV1* infos) {
  return list(device, number, infos);
}
#else
int nvmlInit_v2() {
  return start();
}
int nvmlDeviceGetCount_v2(unsigned* number) {
  return count(number);
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  return handle(index, device);
}
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* number, ProcessV2* infos) {
  return list(device, number, infos);
}
int nvmlDeviceGetMemoryInfo_v2(void* device, MemoryV2* memory) {
  if (memory->version != (sizeof(MemoryV2) | 2U << 24)) {
    return 25;  // NVML_ERROR_ARGUMENT_VERSION_MISMATCH
  }
  Numbers numbers{};
  const int status = numbers_of(device, &numbers);
  *memory = {memory->version, numbers.total, numbers.reserved, numbers.free, numbers.used};
  return status;
}
int nvmlDeviceGetMigMode(void* device, unsigned* current, unsigned* pending) {
  if (!scenario().starts_with("mig") || of(device).gpu != 0) {
    return kNotSupported;
  }
  *current = *pending = 1;
  return kOk;
}
int nvmlDeviceGetMaxMigDeviceCount(void* /*device*/, unsigned* number) {
  *number = 7;
  return kOk;
}
int nvmlDeviceGetMigDeviceHandleByIndex(void* /*device*/, unsigned index, void** instance) {
  for (auto& place : instances) {
    if (place.mig == static_cast<int>(index)) {
      *instance = &place;
      return kOk;
    }
  }
  return kNotFound;
}
#endif

int nvmlShutdown() {
  initialized_by = 0;
  return kOk;
}
int nvmlSystemGetDriverVersion(char* out, unsigned size) {
  return put("570.86.10", out, size);
}
int nvmlDeviceGetMemoryInfo(void* device, MemoryV1* memory) {
  Numbers numbers{};
  const int status = numbers_of(device, &numbers);
  *memory = {numbers.total, numbers.free, numbers.used + numbers.reserved};
  return status;
}
int nvmlDeviceGetUUID(void* device, char* out, unsigned size) {
  const auto fake = of(device);
  const auto digit = std::to_string(fake.mig < 0 ? fake.gpu : fake.mig + 4);
  return put(
      (fake.mig < 0 ? "GPU-0000000" : "MIG-0000000") + digit + "-1111-2222-3333-444444444444", out,
      size);
}
int nvmlDeviceGetName(void* device, char* out, unsigned size) {
  const auto fake = of(device);
  if (fake.mig >= 0) {
    return put("NVIDIA H100 MIG 2g.20gb", out, size);
  }
  return put(scenario() == "mixed" && fake.gpu == 1 ? "NVIDIA T400" : "NVIDIA H100", out, size);
}
int nvmlDeviceGetSerial(void* device, char* out, unsigned size) {
  return scenario() == "not_available"
             ? kNotSupported
             : put("16500000000" + std::to_string(of(device).gpu), out, size);
}
int nvmlDeviceGetUtilizationRates(void* device, Rates* rates) {
  rates->memory = 5;
  const unsigned busy = of(device).gpu == 0 ? 97 : 0;
  return unless_hidden(device, &rates->gpu, scenario() == "huge" ? ~0U : busy);
}
int nvmlDeviceGetTemperature(void* device, int sensor, unsigned* celsius) {
  return sensor == 0 ? unless_hidden(device, celsius, 61) : kInvalidArgument;
}
int nvmlDeviceGetPowerUsage(void* device, unsigned* milliwatts) {
  if (scenario() == "lost_midway" && of(device).gpu == 0) {
    return kGpuIsLost;
  }
  return scenario() == "broken_power" ? kUnknown : unless_hidden(device, milliwatts, 412500);
}
int nvmlDeviceGetEnforcedPowerLimit(void* device, unsigned* milliwatts) {
  return unless_hidden(device, milliwatts, 700000);
}
int nvmlDeviceGetDisplayMode(void* device, unsigned* on) {
  return unless_hidden(device, on, 0);
}
int nvmlDeviceGetDisplayActive(void* device, unsigned* on) {
  return unless_hidden(device, on, 0);
}

}  // extern "C"
