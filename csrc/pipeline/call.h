#pragma once
#include <brimful/pipeline/pipeline.h>
#include <brimful/step/step.h>

#include <algorithm>
#include <exception>
#include <vector>

#include "step/retry.h"

namespace brimful::pipeline {

/// One call of step() or forward(), over all its attempts.
struct Call {
  int64_t rows = 0;  ///< 0: this replica has no data
  const PipelineWork& work;
  StepGroup& group;  ///< the replicas' reducers, and parameters that are in none
  Retry retry;       ///< its plan is the attempt's
  bool trains = true;
  std::exception_ptr refused{};   ///< what went wrong before the first action
  bool failed_elsewhere = false;  ///< on another rank, which says so
  std::exception_ptr lost{};      ///< nothing can be put back: why not
  bool runs = true;   ///< false: all ranks of this pipeline know of it, and none waits for messages
  double ref = 1;     ///< losses' weights are divided by it on all replicas
  uint32_t mark = 0;  ///< of what the replicas must have alike
  std::vector<int64_t> split{};  ///< of a short batch the last ones are empty
  Schedule order{};
  bool as_it_was = false;  ///< of the last attempt, on this rank: it may fit so

  int64_t microbatches() const { return retry.plan().pieces; }
  /// Microbatches that have rows.
  int64_t filled() const { return std::min(rows, microbatches()); }
};

}  // namespace brimful::pipeline
