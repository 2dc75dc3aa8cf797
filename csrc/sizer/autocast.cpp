#include <ATen/autocast_mode.h>
#include <brimful/sizer/autocast.h>
#include <c10/util/Exception.h>

namespace brimful {

namespace autocast = at::autocast;

Autocast::Autocast(c10::DeviceType device_type, std::optional<c10::ScalarType> dtype, bool enabled,
                   std::optional<bool> keep_casts)
    : device_type_(device_type) {
  TORCH_CHECK_VALUE(device_type == at::kCPU || device_type == at::kCUDA,
                    "Autocast knows no rules for this device type (device type: ", device_type,
                    "); use at::kCPU or at::kCUDA");
  outer_enabled_ = autocast::is_autocast_enabled(device_type);
  outer_dtype_ = autocast::get_autocast_dtype(device_type);
  outer_keeps_casts_ = autocast::is_autocast_cache_enabled();
  const auto chosen = dtype.value_or(outer_dtype_);
  TORCH_CHECK_VALUE(chosen == at::kBFloat16 || chosen == at::kHalf,
                    "Autocast casts to bfloat16 or float16 (dtype: ", chosen,
                    "); pass one of them, or enabled = false");
  autocast::set_autocast_enabled(device_type, enabled);
  autocast::set_autocast_dtype(device_type, chosen);
  autocast::increment_nesting();
  autocast::set_autocast_cache_enabled(keep_casts.value_or(outer_keeps_casts_));
}

Autocast::~Autocast() {
  if (autocast::decrement_nesting() == 0) {
    autocast::clear_cache();
  }
  autocast::set_autocast_enabled(device_type_, outer_enabled_);
  autocast::set_autocast_dtype(device_type_, outer_dtype_);
  autocast::set_autocast_cache_enabled(outer_keeps_casts_);
}

}  // namespace brimful
