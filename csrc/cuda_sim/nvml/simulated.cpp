// The devices of the simulated runtime, where this process has one: its functions are null elsewhere.
#include <unistd.h>

#include <algorithm>
#include <cstddef>

#include "fake.h"

extern "C" {
__attribute__((weak)) int sim_cuda_machine_devices();
__attribute__((weak)) void sim_cuda_machine_memory(int device, size_t* total, size_t* own,
                                                   size_t* others);
}

namespace fake_nvml {

bool has_simulated_devices() {
  return sim_cuda_machine_devices != nullptr;
}

int simulated_count() {
  return sim_cuda_machine_devices();
}

Memory simulated_memory(int gpu) {
  size_t total = 0;
  size_t own = 0;
  size_t others = 0;
  sim_cuda_machine_memory(gpu, &total, &own, &others);
  return {total, 0, total - std::min(total, own + others), own + others};
}

std::vector<Process> simulated_processes(int gpu) {
  size_t total = 0;
  size_t own = 0;
  size_t others = 0;
  sim_cuda_machine_memory(gpu, &total, &own, &others);
  std::vector<Process> found;
  if (own > 0) {
    found.push_back({static_cast<unsigned>(getpid()), own});
  }
  if (others > 0) {
    found.push_back({kOtherProcess, others});
  }
  return found;
}

}  // namespace fake_nvml
