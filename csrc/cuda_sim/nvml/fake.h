#pragma once
// What the parts of the made-up driver share. nvml.h is not needed: the numbers and structures are NVML's.
#include <cstdint>
#include <string>
#include <vector>

namespace fake_nvml {

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
constexpr int kArgumentVersionMismatch = 25;
constexpr int kUnknown = 999;
constexpr uint64_t kNotAvailable = ~uint64_t{0};
constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr unsigned kOtherProcess = 3999999;

/// FAKE_NVML, read at every call. Without it: "simulated" in a process that has simulated devices, else "healthy".
std::string scenario();

struct Device {
  int gpu;
  int mig;  // -1: the whole GPU
};
Device of(void* device);
int gpu_count();
int handle_of(int gpu, void** device);

struct Memory {
  uint64_t total, reserved, free, used;
};
struct Process {
  unsigned pid;
  uint64_t used;
};

/// What the simulated runtime in this process says of a device of the machine.
bool has_simulated_devices();
int simulated_count();
Memory simulated_memory(int gpu);
std::vector<Process> simulated_processes(int gpu);

/// From the first nvmlInit to the last nvmlShutdown; as of NVML's own, a child's calls do not count.
bool initialized();
/// What every call on this device answers, if it is not kOk.
int status_of(void* device);
/// Writes a text as NVML does.
int put(const std::string& text, char* out, unsigned size);

}  // namespace fake_nvml
