#pragma once
#include <brimful/export.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace brimful::pipeline {

/// Pipeline::cancel() has ended the call.
class BRIMFUL_API Interrupted : public std::runtime_error {
 public:
  Interrupted() : std::runtime_error("the call was cancelled; everything is as before it") {}
};

/// A stage's part of a step; all zero for stages of other processes.
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
};

struct PipelineOutcome {
  double loss = 0;    ///< weighted mean over all rows
  double weight = 0;  ///< the sum of the microbatches'
  int64_t microbatches = 0;
  std::vector<int64_t> split;  ///< rows per microbatch
  int64_t retries = 0;
  double total_ms = 0;   ///< of the attempt that stands
  bool stop = false;     ///< a rank was asked to stop (step/stop.h), and all do after this step
  bool regroup = false;  ///< a rank wants to join, and all form a new group after this step
  /// By device: the most in use during the step, retries included.
  std::vector<std::pair<c10::Device, int64_t>> peak_bytes;
  std::vector<StageNote> stages;
  std::vector<int> recomputed_stages;  ///< of this process, whose forwards ran again in backward
};

}  // namespace brimful::pipeline
