// Memory of devices, and the processes that have it.
#include <unistd.h>

#include "fake.h"

namespace fake_nvml {
namespace {

int memory_of(void* device, Memory* memory) {
  if (const int status = status_of(device)) {
    return status;
  }
  const auto name = scenario();
  const auto fake = of(device);
  if (name == "unified" || (name == "mig_silent" && fake.gpu == 0)) {
    return kNotSupported;
  }
  if (name == "no_permission") {
    return kNoPermission;
  }
  if (name == "simulated") {
    *memory = simulated_memory(fake.gpu);
  } else if (name == "unified_zero") {
    *memory = {0, 0, 0, 0};
  } else if (name == "huge") {
    *memory = {80 * kGiB, kNotAvailable, kNotAvailable, kNotAvailable};
  } else if (fake.mig >= 0) {
    *memory = {20 * kGiB, kGiB / 4, 17 * kGiB, 11 * kGiB / 4};
  } else {
    *memory = {80 * kGiB, kGiB, 70 * kGiB, 9 * kGiB};
  }
  return kOk;
}

std::vector<Process> processes_of(const Device& device) {
  const auto name = scenario();
  const auto me = static_cast<unsigned>(getpid());
  if (name == "simulated") {
    return simulated_processes(device.gpu);
  }
  if (name == "hidden_pids") {
    return {};
  }
  if (name == "host_pids") {
    // Of others, one of which happens to be called as we are.
    return {{me, 7 * kGiB}, {kOtherProcess, 2 * kGiB}};
  }
  if (name == "not_available") {
    return {{me, kNotAvailable}};
  }
  if (name == "crowd") {
    std::vector<Process> crowd;
    for (unsigned i = 0; i < 50; ++i) {
      crowd.push_back({3900000 + i, kMiB});
    }
    return crowd;
  }
  if (device.gpu == 1) {
    return {};
  }
  return {{me, 2 * kGiB}, {kOtherProcess, kGiB}};
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

struct MemoryV1 {
  uint64_t total, free, used;
};
struct MemoryV2 {
  unsigned version;
  uint64_t total, reserved, free, used;
};
struct ProcessV2 {
  unsigned pid;
  uint64_t used;
  unsigned gpu_instance, compute_instance;
};

}  // namespace
}  // namespace fake_nvml

using namespace fake_nvml;

extern "C" {

int nvmlDeviceGetMemoryInfo(void* device, MemoryV1* memory) {
  Memory numbers{};
  const int status = memory_of(device, &numbers);
  *memory = {numbers.total, numbers.free, numbers.used + numbers.reserved};
  return status;
}
// Of old drivers, and what torch asks for when memory runs out.
int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* number, Process* infos) {
  return list(device, number, infos);
}

#ifndef FAKE_NVML_OLD
int nvmlDeviceGetMemoryInfo_v2(void* device, MemoryV2* memory) {
  if (memory->version != (sizeof(MemoryV2) | 2U << 24)) {
    return kArgumentVersionMismatch;
  }
  Memory numbers{};
  const int status = memory_of(device, &numbers);
  *memory = {memory->version, numbers.total, numbers.reserved, numbers.free, numbers.used};
  return status;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* number, ProcessV2* infos) {
  return list(device, number, infos);
}
#endif
}
