#pragma once
#include <brimful/export.h>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace brimful::ladder {

/// Of a moment, a block or a call.
constexpr int64_t kNever = -1;

/// A step of one piece or two, as its device's memory saw it while all that it saved for backward was put aside: what any other way
/// to run it would take follows from that. Moments are places in one order of all events. Plain data.
struct StepEvents {
  struct Block {
    int64_t bytes = 0;
    int64_t taken_at = 0;
    int64_t given_back_at = kNever;  ///< kNever: not in this step
  };
  /// A tensor's storage, saved for backward by one or several operators.
  struct Save {
    int64_t block = kNever;  ///< kNever: from before the step
    int64_t call = kNever;   ///< the innermost that was running; kNever: none
    int64_t saved_at = 0;
    int64_t used_at = kNever;  ///< first, in backward
    int64_t dropped_at = kNever;
  };
  /// Of a module.
  struct Call {
    int32_t module = 0;
    int32_t piece = 0;
    int64_t parent = kNever;  ///< the call around it, which has a lower place
    int64_t entered_at = 0;
    int64_t left_at = 0;
    double forward_ms = 0;           ///< without the time in which tensors were put aside
    std::vector<int64_t> arguments;  ///< blocks that its arguments lie in
    int64_t copied_bytes = 0;        ///< of buffers that it changes, which a recomputation needs
  };

  int64_t size = 0;  ///< moments
  std::vector<Block> blocks;
  std::vector<Save> saves;         ///< in order of saved_at
  std::vector<Call> calls;         ///< in order of entered_at
  double offload_ms_per_byte = 0;  ///< to put aside and to bring back
  /// What is put aside takes the device's memory again when it is used: on CUDA, not on the CPU.
  bool brought_back = false;
};

}  // namespace brimful::ladder
