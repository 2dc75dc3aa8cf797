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

/// How a stage was tried that did not fit.
struct TriedStage {
  const Schedule& schedule;
  bool trains = true;
  bool is_fixed = false;           ///< the schedule, with its number of microbatches
  bool waits_for_retries = false;  ///< it could be on a rung, but no retry is allowed
  StageRung rung = StageRung::none;
};

/// What to do about it, for the text of BatchTooLarge.
std::vector<std::string> advice_on(int stage, const TriedStage& tried);

/// A step in which nothing counts fails on all ranks, which have the same verdict, as it does in a sizer.
PeerVerdict with_weight(PeerVerdict all, const std::string& step, int64_t rows);

}  // namespace brimful::pipeline
