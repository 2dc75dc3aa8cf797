#pragma once
#include <driver_types.h>

#include <cstddef>
#include <string>

namespace sim {

/// What decides the memory that torch's host code takes on a device, and its choice of kernels.
struct DeviceModel {
  std::string name;
  size_t total_bytes;
  int multiprocessors;
  int major, minor;  // its compute capability
  int l2_mib;
};

/// SIM_CUDA_DEVICE: a name of device_models.inc, or such as "24GiB,sms=82,cc=8.9". A word that says neither ends the
/// process with a sentence.
DeviceModel read_device_model(const char* text);

/// What the device says of itself: the limits are those that CUDA's documents give its compute capability.
void describe(const DeviceModel& model, cudaDeviceProp* properties);

/// How many blocks of so many threads, each with so much shared memory, are on a multiprocessor at once. Kernels are
/// taken to need 32 registers a thread.
int blocks_at_once(const cudaDeviceProp& properties, int threads, size_t shared_bytes);

/// The architecture whose kernels a device of this compute capability gets from torch's own builds, as 10 * major + minor.
int architecture_of_kernels(const cudaDeviceProp& properties);

}  // namespace sim
