#pragma once
#include <brimful/export.h>

#include <cstdint>
#include <vector>

#include "ladder/step_events.h"
#include "memory/caching_model.h"
#include "step/rungs.h"

namespace brimful::ladder {

/// A recomputed call's own work on the host.
constexpr double kCallMs = 0.15;

struct PlanCost {
  int64_t peak_bytes = 0;  ///< over what was in use before the step
  double more_ms = 0;      ///< than the step without any rung
};

/// What the step that was recorded would take with these rungs. A recomputation ends with the last tensor that it has to save,
/// but for modules of which `whole` says that they run to their end. Pure.
BRIMFUL_API PlanCost cost_of(const StepEvents& step, const Rungs& rungs,
                             const std::vector<bool>& whole = {});

/// What an allocator is asked for meanwhile, all on one stream. Pure.
BRIMFUL_API std::vector<memory::CachingRequest> requests_of(const StepEvents& step,
                                                            const Rungs& rungs,
                                                            const std::vector<bool>& whole,
                                                            uint64_t stream);

}  // namespace brimful::ladder
