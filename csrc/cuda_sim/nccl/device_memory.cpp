// Memory of devices, which may have no bytes.
#include <cstring>

#include "../runtime/sim_cuda.h"
#include "communicator.h"

namespace sim_nccl {

std::string read(const void* from, size_t bytes) {
  std::string values(sim_cuda_read(nullptr, from, bytes), 0);
  sim_cuda_read(values.data(), from, values.size());
  return values;
}

void write(void* to, const std::string& values, size_t bytes) {
  sim_cuda_write(to, values.data(), values.size(), bytes);
}

void move(void* to, const void* from, size_t bytes) {
  if (to != from) {
    write(to, read(from, bytes), bytes);
  }
}

}  // namespace sim_nccl
