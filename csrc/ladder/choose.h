#pragma once
#include <brimful/export.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "ladder/plan_peak.h"

namespace brimful::ladder {

/// What may be done with the modules of a step, by their numbers.
struct Allowed {
  std::vector<bool> recompute;
  std::vector<bool> offload;
  std::vector<bool> whole = {};  ///< see cost_of()
};

struct Choice {
  Rungs rungs;
  PlanCost cost;
};

/// Beside the sum of what it holds: whether an allocator would find room for it.
using Fits = std::function<bool(const Rungs&)>;

/// The rungs that take the least time among those whose peak is within `room_bytes`, and that fit; nothing where none is. Of
/// models with few calls all are tried; of others those that a dynamic program over the held bytes finds, for a falling
/// bound, and from there with less. On CUDA with what is offloaded fetched ahead, and without where nothing fits so. Pure.
BRIMFUL_API std::optional<Choice> cheapest(const StepEvents& step, const Allowed& allowed,
                                           int64_t room_bytes, const Fits& fits = {});

}  // namespace brimful::ladder
