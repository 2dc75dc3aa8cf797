#pragma once
#include <brimful/export.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <optional>

namespace brimful {

/// torch.autocast for C++: while it lives, this thread's operations on `device_type` run in `dtype` where torch holds
/// that to be safe. Nests; parameters that were cast are kept for reuse until the outermost one ends. Wrap the forward
/// and the loss, not the backward. Destroy it on the thread that made it, the newest first. Does not wait for a device.
class BRIMFUL_API Autocast {
 public:
  /// Defaults: `dtype` as torch has it for the device type (CPU: bfloat16, CUDA: float16), `keep_casts` (torch's
  /// cache_enabled) as outside. `enabled = false` switches an outer one off.
  /// @throws c10::ValueError for a device type other than CPU and CUDA, or a dtype other than bfloat16 and float16
  explicit Autocast(c10::DeviceType device_type, std::optional<c10::ScalarType> dtype = {},
                    bool enabled = true, std::optional<bool> keep_casts = {});
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  c10::DeviceType device_type_;
  bool outer_enabled_ = false;
  bool outer_keeps_casts_ = false;
  c10::ScalarType outer_dtype_ = c10::ScalarType::Undefined;
};

}  // namespace brimful
