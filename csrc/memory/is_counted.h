#pragma once
#include <c10/core/Device.h>

namespace brimful::memory {

/// What memory::stats() knows of.
inline bool is_counted(c10::Device device) {
  return device.is_cpu() || device.is_cuda();
}

}  // namespace brimful::memory
