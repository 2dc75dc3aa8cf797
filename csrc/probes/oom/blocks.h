#pragma once
#include <brimful/memory/live_table.h>
#include <brimful/probes/oom_report.h>

#include <vector>

namespace brimful::probes {

/// Puts what the blocks that live say into the facts, whose step, program and fragmentation are known: lines, growth, gradients, and
/// whose block it is that splits the room.
BRIMFUL_API void read_blocks(OomFacts& facts, const std::vector<memory::LiveBlock>& blocks);

}  // namespace brimful::probes
