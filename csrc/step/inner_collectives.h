#pragma once
#include <brimful/step/step.h>

#include <algorithm>

namespace brimful {

/// Of the one participant that has any.
inline InnerCollectives inner_collectives(const StepGroup& group) {
  auto all = InnerCollectives::none;
  for (const auto& participant : group.participants()) {
    all = std::max(all, participant->inner_collectives());
  }
  return all;
}

}  // namespace brimful
