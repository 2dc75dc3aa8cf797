#pragma once
#include <brimful/export.h>
#include <brimful/pipeline/schedule.h>

#include <cstdint>
#include <string>
#include <vector>

namespace brimful::pipeline {

/// Where a rank of this process is in the step that is under way.
struct RankProgress {
  int rank = 0;
  int64_t done = 0;     ///< actions
  int64_t actions = 0;  ///< of its order
  Action action;        ///< the one after those done, in which it is; `done` == `actions`: none
  bool waits = false;   ///< for the action's message
  double seconds = 0;   ///< since the action began; 0 without `trace`
};

/// What a pipeline is doing; see Pipeline::progress().
struct PipelineProgress {
  std::string doing;                ///< "no call is under way", or the part of a call
  std::vector<RankProgress> ranks;  ///< of this process, while a step's actions run
};
/// A line, and one for each rank: "rank 0: action 5 of 16, 0B1 (backward of microbatch 1 in stage 0), for 0.3 s".
BRIMFUL_API std::string to_string(const PipelineProgress& progress);

}  // namespace brimful::pipeline
