#pragma once
#include <brimful/error.h>
#include "pipeline/call.h"
#include "pipeline/executor/executor.h"
#include "pipeline/transport/peers.h"
#include "step/too_large.h"

#include <cstdint>
#include <string>
#include <vector>

namespace brimful::pipeline {

/// The error of the action with to_string(failure) in its message: see Pipeline::step().
[[noreturn]] void rethrow(ActionFailure failure);

/// A call that no number of microbatches saves.
struct Tried {
  const Call& call;
  const ActionFailure& failure;  ///< the one that ran out of memory
  c10::Device device;            ///< where
  const PipelineOptions& options;
  const std::vector<Stage>& stages;  ///< of this process
  StageRung rung = StageRung::none;  ///< of the stage that failed
  bool may_split = true;             ///< the BatchNorms of all ranks may be given microbatches
};

/// What is known of it, for the text of BatchTooLarge, with what may be done.
Shortfall shortfall_of(const Tried& tried);

/// A step in which nothing counts fails on all ranks, which have the same verdict, as it does in a sizer.
PeerVerdict with_weight(PeerVerdict all, const std::string& step, int64_t rows);

}  // namespace brimful::pipeline
