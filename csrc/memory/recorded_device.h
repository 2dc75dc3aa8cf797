#pragma once
#include <brimful/memory/recording.h>
#include <vector>
#include "memory/block_table.h"
#include "memory/event_ring.h"

namespace brimful::memory {

/// What a device's table has when its recording ends.
struct RingEnd {
  std::vector<Block> live;
  uint64_t last_event = 0;  ///< the number of the table's newest
  int64_t used_bytes = 0;
  int64_t step = 0;
};

/// Undoes the kept events from the end to know what stood before the first. Sites are numbered as in the process.
/// Pure.
DeviceRecording recorded_device(const EventRing& ring, const RingEnd& end,
                                const std::vector<Label>& labels, int64_t began_ns);

}  // namespace brimful::memory
