#include "probes/gpu/nvml.h"
#include <stdexcept>

namespace brimful::probes::nvml {

std::string to_string(Status status) {
  switch (status) {
    case kUninitialized:
    case kDriverNotLoaded:
      return "the NVIDIA driver is not loaded, or went away";
    case kNotSupported:
      return "not supported";
    case kNoPermission:
      return "no permission: ask as root, or let the container see the device";
    case kNotFound:
      return "no such device";
    case kTimeout:
      return "the driver did not answer in time";
    case kGpuIsLost:
      return "the GPU is lost: it fell off the bus (see dmesg, then reset it or reboot)";
    case kResetRequired:
      return "the GPU needs a reset";
    case kVersionMismatch:
      return "libnvidia-ml.so.1 and the driver have different versions: reboot, or start the "
             "container again after a driver's update";
    case kUnknown:
      return "the driver answers with an internal error";
    default:
      return "NVML error " + std::to_string(static_cast<int>(status));
  }
}

Library::Library(const std::string& path) : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (handle_ == nullptr) {
    const char* error = dlerror();
    throw std::runtime_error("no NVIDIA driver here (" +
                             std::string(error == nullptr ? path : error) + ")");
  }
}

Library::~Library() {
  dlclose(handle_);
}

}  // namespace brimful::probes::nvml
