#pragma once
#include <cstddef>

namespace sim {

/// Waits until what another stream was to write there is written. For the host: operators say what is known when they are
/// called, whatever their streams still have to do. A stream's own thread does not wait: its order is that of events.
void settle(const void* begin, size_t bytes);

}  // namespace sim
