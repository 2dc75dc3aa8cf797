#include <brimful/probes/leak.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <optional>

#include "probes/leak/left_steps.h"

namespace brimful::probes {
namespace {

using Steps = std::map<int64_t, LeftByStep>;

/// Whether the later half of the steps took half as long again as the first half: a cache meets few new keys at last.
bool is_slowing(Steps::const_iterator first, int64_t count) {
  const auto half = count / 2;
  const auto middle = std::next(first, half);
  const auto second = std::next(first, count - 1 - half);
  const auto end = std::next(second, half);
  return 2 * (end->first - second->first) > 3 * (middle->first - first->first);
}

/// The run of steps up to the newest, of which no gap is twice as long as another; nothing if the next is overdue.
std::optional<Growth> run_of(uint32_t site, const Steps& steps, Steps::const_iterator first,
                             int64_t last) {
  Growth growth{.site = site};
  int64_t least = 0;
  for (auto at = steps.end(); at != first;) {
    const auto newer = at--;
    if (newer != steps.end()) {
      const auto gap = newer->first - at->first;
      const auto most = std::max(growth.period, gap);
      const auto fewest = least == 0 ? gap : std::min(least, gap);
      if (most >= 2 * fewest) {
        break;
      }
      growth.period = most;
      least = fewest;
    }
    growth.first_step = at->first;
    ++growth.steps;
    growth.blocks += at->second.blocks;
    growth.bytes += at->second.bytes;
  }
  return last - steps.rbegin()->first < growth.period ? std::optional(growth) : std::nullopt;
}

}  // namespace

LeftSteps left_behind(const std::vector<memory::LiveBlock>& blocks, int64_t last) {
  LeftSteps left;
  for (const auto& block : blocks) {
    if (block.step <= last) {
      auto& there = left[block.site][block.step];
      ++there.blocks;
      there.bytes += block.bytes;
    }
  }
  return left;
}

std::vector<Growth> growing_in(const LeftSteps& left, int64_t last, const GrowthOptions& options) {
  std::vector<Growth> found;
  for (const auto& [site, steps] : left) {
    const auto first = steps.lower_bound(options.warm_up);
    const auto count = static_cast<int64_t>(std::distance(first, steps.end()));
    if (count < options.steps) {
      continue;
    }
    auto growth = run_of(site, steps, first, last);
    if (growth && growth->steps >= options.steps) {
      growth->all_steps = count;
      growth->slowing = is_slowing(first, count);
      found.push_back(*growth);
    }
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Growth& a, const Growth& b) { return a.bytes > b.bytes; });
  return found;
}

std::vector<Growth> growing(const std::vector<memory::LiveBlock>& blocks, int64_t step,
                            const GrowthOptions& options) {
  TORCH_CHECK_VALUE(options.steps >= 2 && options.warm_up >= 0,
                    "growth is seen over two steps at least (steps: ", options.steps,
                    ", warm_up: ", options.warm_up, ")");
  return growing_in(left_behind(blocks, step - 2), step - 2, options);
}

}  // namespace brimful::probes
