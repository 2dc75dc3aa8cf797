#pragma once
#include <brimful/error.h>
#include "pipeline/executor/executor.h"
#include "pipeline/transport/peers.h"

#include <cstdint>
#include <string>
#include <vector>

namespace brimful::pipeline {

/// The error of the action with to_string(failure) in its message: see Pipeline::step().
[[noreturn]] void rethrow(ActionFailure failure);

/// How a step was tried that did not fit.
struct TriedStep {
  int64_t rows = 0;
  std::vector<TriedSplit> splits;  ///< in microbatches
  int64_t max_retries = 0;
  Schedule schedule;
  bool trains = true;
  bool is_fixed = false;        ///< the schedule, with its number of microbatches
  bool may_split = true;        ///< into more microbatches
  bool may_recompute = true;    ///< stages, where a retry is left
  std::vector<int> recomputed;  ///< stages
};

/// What a step raises that no number of microbatches would save.
BatchTooLarge too_large(const ActionFailure& failure, TriedStep tried, c10::Device device);

/// A step in which nothing counts fails on all ranks, which have the same verdict, as it does in a sizer.
PeerVerdict with_weight(PeerVerdict all, int64_t rows);

}  // namespace brimful::pipeline
