#include "sizer/optimizer_room.h"
#include <brimful/error.h>
#include <brimful/memory/stats.h>

#include <sstream>

#include "base/format.h"

namespace brimful {
namespace {
constexpr int64_t kSlackBytes = 1024;  // numbers that kernels wrap in tensors
}

void require_room_for_optimizer(c10::Device device, int64_t bytes) {
  const auto now = memory::stats(device);
  if (bytes == 0 || !now.limit_bytes || bytes + kSlackBytes <= *now.limit_bytes - now.used_bytes) {
    return;
  }
  std::ostringstream text;
  text << "the optimizer's step would run out of memory, whatever the split (device: " << device
       << ", limit: " << format_bytes(*now.limit_bytes)
       << ", in use before the step: " << format_bytes(now.used_bytes)
       << ", gradients and optimizer: " << format_bytes(bytes)
       << "); raise the limit, take an optimizer with less state, or shard the model";
  throw BatchTooLarge(text.str());
}

}  // namespace brimful
