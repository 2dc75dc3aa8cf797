#pragma once
#include <brimful/probes/leak.h>

#include <cstdint>
#include <map>
#include <vector>

namespace brimful::probes {

/// What each complete step up to `last` has left behind: by site, by step.
struct LeftByStep {
  int64_t blocks = 0;
  int64_t bytes = 0;
};
using LeftSteps = std::map<uint32_t, std::map<int64_t, LeftByStep>>;
LeftSteps left_behind(const std::vector<memory::LiveBlock>& blocks, int64_t last);

/// growing() of what is left.
std::vector<Growth> growing_in(const LeftSteps& left, int64_t last, const GrowthOptions& options);

}  // namespace brimful::probes
