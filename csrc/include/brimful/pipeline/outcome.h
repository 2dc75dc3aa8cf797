#pragma once
#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace brimful::pipeline {

/// A stage's part of a step.
struct StageNote {
  int peak_live = 0;  ///< microbatches whose activations were held at once
  // Zero without a trace.
  double forward_ms = 0;
  double backward_ms = 0;  ///< to inputs and to weights
  double wait_ms = 0;      ///< for messages
};

struct PipelineOutcome {
  double loss = 0;    ///< weighted mean over all rows
  double weight = 0;  ///< the sum of the microbatches'
  int64_t microbatches = 0;
  std::vector<int64_t> split;  ///< rows per microbatch
  int64_t retries = 0;
  double total_ms = 0;  ///< of the attempt that stands
  /// By device: the most in use during the step, retries included.
  std::vector<std::pair<c10::Device, int64_t>> peak_bytes;
  std::vector<StageNote> stages;
};

}  // namespace brimful::pipeline
