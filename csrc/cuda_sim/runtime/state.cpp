#include "state.h"

#include <utility>

namespace sim {
namespace {

thread_local int current = 0;
thread_local cudaError_t last = cudaSuccess;

/// Takes one of the planted faults of this function. With the lock.
cudaError_t planted(const char* function) {
  State& s = state();
  const auto found = s.faults.find(function);
  if (found == s.faults.end()) {
    return cudaSuccess;
  }
  Fault& fault = found->second;
  if (fault.after-- > 0) {
    return cudaSuccess;
  }
  const cudaError_t error = fault.error;
  if (--fault.times <= 0) {
    s.faults.erase(found);
  }
  return error;
}

}  // namespace

State::State() : devices(visible_devices().size()) {
  for (size_t i = 0; i < devices.size(); ++i) {
    devices[i].streams.push_back(new CUstream_st(static_cast<int>(i), 0));
  }
}

State& state() {
  static State* all = new State;  // never destroyed: static destructors of others still call in
  return *all;
}

int& current_device() {
  return current;
}

cudaError_t fail(cudaError_t error) {
  return last = error;
}

cudaError_t peek_last() {
  return last;
}

cudaError_t take_last() {
  return std::exchange(last, cudaSuccess);
}

cudaError_t sticky() {
  const std::lock_guard lock(state().mutex);
  const auto& devices = state().devices;
  return devices.empty() ? cudaSuccess : devices[current].sticky;
}

cudaError_t settled() {
  const cudaError_t error = sticky();
  return error == cudaSuccess ? error : fail(error);
}

cudaError_t enter_without_device(const char* function) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  ++s.calls[function];
  const cudaError_t error = planted(function);
  return error == cudaSuccess ? error : fail(error);
}

cudaError_t enter(const char* function) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  ++s.calls[function];
  if (s.devices.empty()) {
    return fail(cudaErrorNoDevice);
  }
  Device& device = s.devices[current];
  device.active = true;
  if (device.sticky != cudaSuccess) {
    return fail(device.sticky);
  }
  const cudaError_t error = planted(function);
  return error == cudaSuccess ? error : fail(error);
}

CUstream_st* real(cudaStream_t stream) {
  const bool stands_for_default =
      reinterpret_cast<uintptr_t>(stream) <= 2;  // null, legacy, per thread
  return stands_for_default ? state().devices[current].streams[0] : stream;
}

std::vector<cudaStream_t> streams_of(int device) {
  const std::lock_guard lock(state().mutex);
  return state().devices[device].streams;
}

}  // namespace sim
