#pragma once
#include <brimful/export.h>

namespace brimful {

/// Frees the gradients that a backward which failed left under way: the engine by itself keeps them in this thread's
/// queue until the thread's next backward, and its thread of the current CUDA device may still hold some: it is waited
/// for, but not the device. Does nothing within a backward. Not with the GIL.
BRIMFUL_API void empty_engine_queue() noexcept;

/// `backward()`, and the above where it throws.
template <typename Backward>
auto run_backward_cleanly(const Backward& backward) {
  try {
    return backward();
  } catch (...) {
    empty_engine_queue();
    throw;
  }
}

}  // namespace brimful
