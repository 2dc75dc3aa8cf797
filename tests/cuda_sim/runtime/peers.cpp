// What libraries that move memory of devices themselves ask: on a device without arithmetic it may have no bytes.
#include <cstring>

#include "known.h"
#include "memory.h"
#include "sim_cuda.h"

extern "C" {

int sim_cuda_has_arithmetic() {
  return sim::settings().arithmetic ? 1 : 0;
}

int sim_cuda_read(void* to, const void* from, size_t bytes) {
  if (sim::is_address_alone(from) && !sim::is_known(from, bytes)) {
    return 0;
  }
  if (to != nullptr) {
    std::memcpy(to, from, bytes);
  }
  return 1;
}

void sim_cuda_write(void* to, const void* from, size_t bytes) {
  if (from == nullptr) {
    sim::forget(to, bytes);
  } else if (!sim::is_address_alone(to) || sim::keep(to, bytes)) {
    std::memcpy(to, from, bytes);
  }
}
}
