#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <optional>

namespace brimful::memory {

/// Zeros on the host for values of `device` on their way to or from it. Pinned, so that no copy is waited for; where the host
/// has no pinned memory left they are not, and each copy is.
at::Tensor zeros_on_host(at::IntArrayRef sizes, at::ScalarType type, c10::Device device);

/// Values as they are now, on their way to the host behind what the device's current stream has to do. Beyond the memory limit.
class ValuesOnHost {
 public:
  explicit ValuesOnHost(const at::Tensor& values);
  /// Null if the device has not come to where the constructor was called. Waits for nothing.
  const at::Tensor* if_come() const { return !arrived_ || arrived_->query() ? &copy_ : nullptr; }
  /// Waits until it has.
  const at::Tensor& get() const;

 private:
  at::Tensor copy_;
  std::optional<c10::Event> arrived_;  ///< nothing for values of the CPU
};

}  // namespace brimful::memory
