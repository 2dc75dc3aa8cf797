#pragma once
#include "state.h"

namespace sim {

/// Memory of the current device, or pinned memory of the host.
cudaError_t allocate(void** out, size_t bytes, Kind kind);
/// Waits for the device whose memory it was, as cudaFree does.
cudaError_t release(void* pointer);
/// Of which memory this is: unregistered for what the runtime does not know.
cudaPointerAttributes attributes_of(const void* pointer);

}  // namespace sim
