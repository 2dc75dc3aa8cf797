// What a device says of itself but for its memory.
#include <cstdio>

#include "fake.h"

namespace fake_nvml {
namespace {

bool simulated() {
  return scenario() == "simulated";
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

struct Rates {
  unsigned gpu, memory;
};
struct Fabric {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
  unsigned health;
};

}  // namespace

int status_of(void* device) {
  if (!initialized()) {
    return kUninitialized;
  }
  return scenario() == "lost" && of(device).gpu == 0 ? kGpuIsLost : kOk;
}

}  // namespace fake_nvml

using namespace fake_nvml;

extern "C" {

// The simulated runtime's identifiers of devices begin with their number plus one.
int nvmlDeviceGetUUID(void* device, char* out, unsigned size) {
  const auto fake = of(device);
  if (simulated()) {
    char text[48];
    snprintf(text, sizeof text, "GPU-%02x000000-0000-0000-0000-000000000000", fake.gpu + 1);
    return put(text, out, size);
  }
  const auto digit = std::to_string(fake.mig < 0 ? fake.gpu : fake.mig + 4);
  const std::string kind = fake.mig < 0 ? "GPU" : "MIG";
  return put(kind + "-0000000" + digit + "-1111-2222-3333-444444444444", out, size);
}
int nvmlDeviceGetName(void* device, char* out, unsigned size) {
  const auto fake = of(device);
  if (simulated()) {
    return put("Simulated GPU", out, size);
  }
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
  if (simulated()) {
    return kNotSupported;  // it is not measured
  }
  rates->memory = 5;
  const unsigned busy = of(device).gpu == 0 ? 97 : 0;
  return unless_hidden(device, &rates->gpu, scenario() == "huge" ? ~0U : busy);
}
int nvmlDeviceGetTemperature(void* device, int sensor, unsigned* celsius) {
  if (simulated()) {
    return kNotSupported;
  }
  return sensor == 0 ? unless_hidden(device, celsius, 61) : kInvalidArgument;
}
int nvmlDeviceGetPowerUsage(void* device, unsigned* milliwatts) {
  if (simulated()) {
    return kNotSupported;
  }
  if (scenario() == "lost_midway" && of(device).gpu == 0) {
    return kGpuIsLost;
  }
  return scenario() == "broken_power" ? kUnknown : unless_hidden(device, milliwatts, 412500);
}
int nvmlDeviceGetEnforcedPowerLimit(void* device, unsigned* milliwatts) {
  return simulated() ? kNotSupported : unless_hidden(device, milliwatts, 700000);
}
int nvmlDeviceGetDisplayMode(void* device, unsigned* on) {
  return unless_hidden(device, on, 0);
}
int nvmlDeviceGetDisplayActive(void* device, unsigned* on) {
  return unless_hidden(device, on, 0);
}

#ifndef FAKE_NVML_OLD
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
  static Device instances[2] = {{0, 0}, {0, 2}};  // place 1 is empty
  for (auto& place : instances) {
    if (place.mig == static_cast<int>(index)) {
      *instance = &place;
      return kOk;
    }
  }
  return kNotFound;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void* /*device*/, unsigned /*link*/, unsigned* /*type*/) {
  return kNotSupported;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void* /*device*/, unsigned /*link*/, void* /*pci*/) {
  return kNotSupported;
}
// No GPU is part of a fabric.
int nvmlDeviceGetGpuFabricInfoV(void* /*device*/, Fabric* info) {
  *info = {info->version, {}, 0, 0, 0, 0};
  return kOk;
}
#endif
}
