// The devices of the simulated runtime, where this process has one: its functions are null elsewhere.
#include <unistd.h>

#include <algorithm>
#include <cstddef>

#include "fake.h"

extern "C" {
__attribute__((weak)) int sim_cuda_machine_devices();
__attribute__((weak)) void sim_cuda_machine_memory(int device, size_t* total, size_t* own,
                                                   size_t* foreign);
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
  size_t foreign = 0;
  sim_cuda_machine_memory(gpu, &total, &own, &foreign);
  return {total, 0, total - std::min(total, own + foreign), own + foreign};
}

std::vector<Process> simulated_processes(int gpu) {
  size_t total = 0;
  size_t own = 0;
  size_t foreign = 0;
  sim_cuda_machine_memory(gpu, &total, &own, &foreign);
  std::vector<Process> found;
  if (own > 0) {
    found.push_back({static_cast<unsigned>(getpid()), own});
  }
  if (foreign > 0) {
    found.push_back({kOtherProcess, foreign});
  }
  return found;
}

}  // namespace fake_nvml
