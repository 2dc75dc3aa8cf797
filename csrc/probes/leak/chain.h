#pragma once
#include <brimful/probes/leak.h>

#include <span>

namespace brimful::probes {

/// Finds out whether the samples of one line, the oldest first, are links of a chain: the way to an older one takes the same step
/// once more ("last.previous.value", "last.value"). Then each of them is `linked`, and its container is the chain's begin.
void mark_chain(std::span<Holder> samples);

}  // namespace brimful::probes
