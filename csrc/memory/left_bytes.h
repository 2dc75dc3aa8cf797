#pragma once
#include <c10/core/Device.h>

#include <cstdint>

namespace brimful::memory {

/// What has stayed allocated since it was made: on the CPU by this thread, on a CUDA device by whoever uses it. Counts
/// nothing on other devices, nor before install(). Belongs to one thread; does not wait for a device.
class LeftBytes {
 public:
  explicit LeftBytes(c10::Device device) : device_(device), before_(now()) {}
  /// Negative where more was freed.
  int64_t bytes() const { return now() - before_; }

 private:
  int64_t now() const;

  c10::Device device_;
  int64_t before_;
};

}  // namespace brimful::memory
