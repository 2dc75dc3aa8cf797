#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "settings.h"
#include "stream.h"

namespace sim {

enum class Kind { device, mapped, host, registered };

struct Block {
  size_t bytes;
  Kind kind;
  int device;
};

struct Fault {
  cudaError_t error;
  long after, times;
};

struct Device {
  size_t used = 0, peak = 0, others = 0;
  cudaError_t sticky = cudaSuccess;
  bool active = false;
  std::vector<cudaStream_t> streams;  // the first is the default stream
};

struct State {
  State();

  std::mutex mutex;
  std::vector<Device> devices;
  std::map<uintptr_t, Block> blocks;
  std::map<std::string, Fault> faults;
  std::map<std::string, long> calls;
};

State& state();

/// The calling thread's device.
int& current_device();

/// Remembers the error for cudaGetLastError and returns it.
cudaError_t fail(cudaError_t error);
/// The calling thread's last error, which is then forgotten.
cudaError_t take_last();
cudaError_t peek_last();

/// The error that the current device has for good, if it has one.
cudaError_t sticky();

/// What a call returns after it has waited: the device may have failed meanwhile.
cudaError_t settled();

/// Whether a call may go on: counts it, fails it where a fault is planted, and after a sticky error fails all.
cudaError_t enter(const char* function);
/// The same for a function that answers without a device, and after a sticky error.
cudaError_t enter_without_device(const char* function);

/// The stream itself; the current device's default stream for what stands for it.
CUstream_st* real(cudaStream_t stream);
/// The streams of a device, to be waited for without the lock.
std::vector<cudaStream_t> streams_of(int device);

#define SIM_ENTER()                                        \
  if (const cudaError_t error_ = ::sim::enter(__func__)) { \
    return error_;                                         \
  }                                                        \
  static_assert(true, "")

}  // namespace sim
