#include "memory/cuda_caching.h"
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>
#include "memory/cuda.h"

namespace brimful::memory {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using Entry = caching::TraceEntry;

CachingSettings settings_now(const caching::AllocatorConfigInfo& config) {
  using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
  constexpr auto kMost = static_cast<size_t>(std::numeric_limits<int64_t>::max());
  CachingSettings settings;
  settings.max_split_bytes = static_cast<int64_t>(std::min(config.max_split_size, kMost));
  settings.max_unsplit_excess_bytes =
      static_cast<int64_t>(std::min(Config::max_non_split_rounding_size(), kMost));
  settings.large_segment_bytes = static_cast<int64_t>(Config::large_segment_size());
  settings.garbage_collection_threshold = config.garbage_collection_threshold;
  settings.expandable = Config::use_expandable_segments();
  for (const size_t divisions : config.roundup_power2_divisions) {
    settings.power2_divisions.push_back(static_cast<int64_t>(divisions));
  }
  return settings;
}

CachingBlock caching_block_of(const c10::CachingDeviceAllocator::BlockInfo& known) {
  using State = CachingBlock::State;
  const auto state = known.allocated ? State::live : known.active ? State::pending : State::cached;
  return {static_cast<int64_t>(known.size), state, known.gc_counter};
}

CachingRoom room_now(c10::DeviceIndex index) {
  const auto memory = cuda_memory(index);
  CachingRoom room{memory.total_bytes, memory.free_bytes};
  if (const auto fraction = caching::getMemoryFraction(index); fraction < 1) {
    room.allowed_bytes = std::llround(fraction * static_cast<double>(memory.total_bytes));
  }
  return room;
}

}  // namespace

bool has_cuda_pool() {
  return caching::get()->initialized() && caching::get()->name() == "native";
}

std::optional<CudaPool> cuda_pool(c10::Device device) {
  const auto index = checked_cuda_index(device);
  if (!has_cuda_pool()) {
    return std::nullopt;
  }
  const auto snapshot = caching::snapshot({0, 0}, /*include_traces=*/false);
  CudaPool pool;
  for (const auto& known : snapshot.segments) {
    if (known.device != index) {
      continue;
    }
    CachingSegment segment{known.address,
                           reinterpret_cast<uint64_t>(known.stream),
                           !known.is_large,
                           known.is_expandable,
                           known.owner_private_pool_id != decltype(known.owner_private_pool_id){},
                           known.registration_counter};
    std::transform(known.blocks.begin(), known.blocks.end(), std::back_inserter(segment.blocks),
                   caching_block_of);
    pool.segments.push_back(std::move(segment));
  }
  pool.settings = settings_now(snapshot.config_metadata);
  pool.room = room_now(index);
  pool.stream = reinterpret_cast<uint64_t>(c10::cuda::getCurrentCUDAStream(index).stream());
  return pool;
}

}  // namespace brimful::memory
