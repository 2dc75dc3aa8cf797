#pragma once
#include <brimful/export.h>

#include <cstdint>
#include <vector>

#include "ladder/step_events.h"

namespace brimful::ladder {

/// What a piece took whose parts were all recomputed. Without hooks for saved tensors that is all that can be known.
struct PartFigures {
  struct Call {
    int32_t part = 0;
    double forward_ms = 0;
    int64_t saved_bytes = 0;  ///< that it holds where it is not recomputed
    /// The most in use over what was in use before the step, from its second run to that of the next call.
    int64_t peak_bytes = 0;
  };
  std::vector<Call> calls;          ///< in order of their first runs
  std::vector<int64_t> second_run;  ///< places of calls, in order of their second runs
  int64_t peak_bytes = 0;           ///< before the first of those
};

/// As a step from which plans follow: what parts that are not recomputed hold is added to those peaks. Never less than a plan
/// takes, if the piece's parts run as they did. Pure.
BRIMFUL_API StepEvents events_of(const PartFigures& piece);

}  // namespace brimful::ladder
