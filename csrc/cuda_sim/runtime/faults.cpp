// What a test plants and asks.
#include "sim_cuda.h"
#include "state.h"

using sim::state;

extern "C" {

void sim_cuda_plant_error(int device, int error) {
  const std::lock_guard lock(state().mutex);
  state().devices.at(device).sticky = static_cast<cudaError_t>(error);
}

void sim_cuda_plant_fault(const char* function, int error, long after, long times) {
  const std::lock_guard lock(state().mutex);
  state().faults[function] = {static_cast<cudaError_t>(error), after, times};
}

long sim_cuda_calls(const char* function) {
  if (!sim::devices_are_chosen()) {
    return 0;
  }
  const std::lock_guard lock(state().mutex);
  return state().calls[function];
}

void sim_cuda_note_operator() {
  const std::lock_guard lock(state().mutex);
  ++state().calls["operator"];
}

void sim_cuda_set_others(int device, size_t bytes) {
  const std::lock_guard lock(state().mutex);
  state().devices.at(device).others = bytes;
}

void sim_cuda_set_delay(long us) {
  sim::delay_us() = us;
}

void sim_cuda_hold(cudaStream_t stream) {
  sim::real(stream)->hold();
}

void sim_cuda_release(cudaStream_t stream) {
  sim::real(stream)->release();
}

int sim_cuda_defers(cudaStream_t stream) {
  return sim::real(stream)->defers() ? 1 : 0;
}

int sim_cuda_active(int device) {
  const std::lock_guard lock(state().mutex);
  return state().devices.at(device).active ? 1 : 0;
}

void sim_cuda_enqueue(cudaStream_t stream, void (*work)(void*), void* data) {
  sim::real(stream)->enqueue([=] { work(data); }, sim::When::by_thread);
}

int sim_cuda_machine_devices() {
  return sim::settings().devices;
}

size_t sim_cuda_peak_bytes(int device) {
  const std::lock_guard lock(sim::state().mutex);
  return device >= 0 && static_cast<size_t>(device) < sim::state().devices.size()
             ? sim::state().devices[device].peak
             : 0;
}

void sim_cuda_machine_memory(int device, size_t* total, size_t* own, size_t* others) {
  *total = sim::settings().total_bytes;
  *own = *others = 0;
  if (!sim::devices_are_chosen()) {  // the driver does not choose them
    return;
  }
  const auto& visible = sim::visible_devices();
  const std::lock_guard lock(state().mutex);
  for (size_t i = 0; i < visible.size(); ++i) {
    if (visible[i] == device) {
      *own = state().devices[i].used;
      *others = state().devices[i].others;
    }
  }
}
}
