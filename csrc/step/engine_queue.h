#pragma once
#include <brimful/export.h>
#include <c10/core/Device.h>

namespace brimful {

/// Frees the graph and the gradients that a backward which failed on this device left under way: the engine by itself keeps
/// them in this thread's queue until the thread's next backward, and its thread of a CUDA device may still hold some, or be at
/// work where a node of the CPU failed: it is waited for, but not the device. Does nothing within a backward. Not with the GIL.
BRIMFUL_API void empty_engine_queue(c10::Device device) noexcept;

/// `backward()`, and the above where it throws.
template <typename Backward>
auto run_backward_cleanly(c10::Device device, const Backward& backward) {
  try {
    return backward();
  } catch (...) {
    empty_engine_queue(device);
    throw;
  }
}

}  // namespace brimful
