#pragma once
#include <cstdint>
#include <string>

namespace brimful {

/// A pipeline's stage in a step; all zero for stages of other processes.
struct StageNote {
  int peak_live = 0;  ///< microbatches whose activations were held at once
  // Zero without a trace.
  /// The most bytes that forwards had left allocated for their backwards at once, counted between actions: on the CPU what
  /// the stage's own thread allocated, on a CUDA device what came to be in use there.
  int64_t peak_live_bytes = 0;
  double forward_ms = 0;
  double backward_ms = 0;  ///< to inputs and to weights
  double wait_ms = 0;      ///< for messages
  // At the end of the step. A parameter that several stages have counts in each.
  int64_t parameter_bytes = 0;
  int64_t gradient_bytes = 0;
  int64_t buffer_bytes = 0;
  /// Why its backward is not, or not entirely, split into I and W; empty where it is, or the schedule does not ask for it.
  std::string split_note;
  bool recomputed = false;  ///< its forward ran again in backward; of stages of this process
  bool offloaded = false;   ///< what it saved lay in a file, or on the host; of the same
};

}  // namespace brimful
