#pragma once
#include "state.h"

namespace sim {

/// Memory of the current device, or pinned memory of the host.
cudaError_t allocate(void** out, size_t bytes, Kind kind);
/// Waits for the device whose memory it was, as cudaFree does.
cudaError_t release(void* pointer);
/// The same without waiting: for work of the stream that frees it.
cudaError_t release_now(void* pointer);

/// Counts bytes for a device, if it has them left; and gives them back.
bool take(int device, size_t bytes);
void give_back(int device, size_t bytes);
/// Memory of a device that is counted elsewhere.
void know_block(void* pointer, size_t bytes, int device);
void forget_block(void* pointer);

/// How the memory of a device lies in the host's: that of one without arithmetic is not touched.
int protection();

/// Of which memory this is: unregistered for what the runtime does not know.
cudaPointerAttributes attributes_of(const void* pointer);

/// Whether it is memory of a device without arithmetic: it has no bytes.
bool is_address_alone(const void* pointer);

}  // namespace sim
