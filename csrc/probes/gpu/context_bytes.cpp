#include <brimful/memory/stats.h>
#include <brimful/probes/gpus.h>
#include <algorithm>
#include "memory/tracker.h"

namespace brimful::probes {

std::optional<int64_t> context_bytes(const GpuReport& report, int cuda_index,
                                     int64_t reserved_bytes) {
  const auto gpu = std::find_if(report.gpus.begin(), report.gpus.end(),
                                [&](const Gpu& g) { return g.cuda_index == cuda_index; });
  if (gpu == report.gpus.end() || !gpu->own_bytes) {
    return std::nullopt;
  }
  return std::max<int64_t>(0, *gpu->own_bytes - reserved_bytes);
}

std::optional<int64_t> context_bytes(c10::Device given) {
  const auto device = memory::checked(given);
  if (!device.is_cuda()) {
    return std::nullopt;
  }
  const auto stats = memory::stats(device);
  return stats.counted ? context_bytes(read_gpus(), device.index(), stats.reserved_bytes)
                       : std::nullopt;
}

}  // namespace brimful::probes
