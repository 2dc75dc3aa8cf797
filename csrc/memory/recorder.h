#pragma once
#include <memory>
#include "memory/event_ring.h"

/// What the live table asks the recording.
namespace brimful::memory {

/// For a device that comes into use while memory is recorded; nothing else, or where there is no memory for it.
std::unique_ptr<EventRing> new_ring() noexcept;

void lock_recording();
void unlock_recording();
/// In the child of a fork, with the lock.
void forget_recording() noexcept;

}  // namespace brimful::memory
