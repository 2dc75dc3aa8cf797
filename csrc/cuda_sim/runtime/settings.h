#pragma once
#include <atomic>
#include <cstddef>
#include <optional>
#include <vector>

#include "device_model.h"

namespace sim {

/// What stands for a figure that is not known. Unset: the least count of values, and workspaces on the line.
enum class Unknown { unset, least, most };

/// The variables SIM_CUDA_*, as they are when the first function of the runtime is called.
struct Settings {
  int devices;         // SIM_CUDA_DEVICES
  size_t total_bytes;  // SIM_CUDA_MEMORY_MB, of each device
  bool
      arithmetic;  // SIM_CUDA_ARITHMETIC; without it memory of a device is addresses alone, and kernels do nothing
  bool operators;                    // SIM_CUDA_NO_OPERATORS is not set, and there is arithmetic
  std::optional<DeviceModel> model;  // SIM_CUDA_DEVICE
  size_t known_bytes;                // SIM_CUDA_KNOWN_MB, of one tensor; 0 with arithmetic
  Unknown unknown;                   // SIM_CUDA_UNKNOWN
};

const Settings& settings();

/// SIM_CUDA_DELAY_US, until a test sets another; -1: work is done inside the call that asks for it.
std::atomic<long>& delay_us();

/// SIM_CUDA_STRICT, until a test sets another: a kernel without a stand-in ends the process.
std::atomic<bool>& strict();

/// The devices of the machine that CUDA_VISIBLE_DEVICES leaves: read once, as by the real runtime.
const std::vector<int>& visible_devices();
/// Whether a call has read them: until then the process may choose others.
bool devices_are_chosen();

}  // namespace sim
