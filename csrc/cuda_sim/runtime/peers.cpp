// What libraries that move memory of devices themselves ask: on a device without arithmetic it may have no bytes.
#include <cstring>

#include "known.h"
#include "memory.h"
#include "sim_cuda.h"

extern "C" {

int sim_cuda_has_arithmetic() {
  return sim::settings().arithmetic ? 1 : 0;
}

size_t sim_cuda_read(void* to, const void* from, size_t bytes) {
  const size_t known = sim::is_address_alone(from) ? sim::known_before(from, bytes) : bytes;
  if (to != nullptr) {
    std::memcpy(to, from, known);
  }
  return known;
}

void sim_cuda_write(void* to, const void* from, size_t known, size_t bytes) {
  if (!sim::is_address_alone(to) || (known > 0 && sim::keep(to, known))) {
    std::memcpy(to, from, known);
  } else {
    known = 0;
  }
  if (known < bytes) {
    sim::forget(static_cast<char*>(to) + known, bytes - known);
  }
}
}
