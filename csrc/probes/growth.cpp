#include <brimful/probes/leak.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

namespace brimful::probes {

std::vector<Growth> growing(const std::vector<memory::LiveBlock>& blocks, int64_t step,
                            const GrowthOptions& options) {
  TORCH_CHECK_VALUE(options.steps >= 2 && options.warm_up >= 0,
                    "growth is seen over two steps at least (steps: ", options.steps,
                    ", warm_up: ", options.warm_up, ")");
  const int64_t last = step - 2;
  std::map<uint32_t, std::map<int64_t, Growth>> left;  // by site, by step
  for (const auto& block : blocks) {
    if (block.step >= options.warm_up && block.step <= last) {
      auto& there = left[block.site][block.step];
      ++there.blocks;
      there.bytes += block.bytes;
    }
  }
  std::vector<Growth> found;
  for (const auto& [site, steps] : left) {
    Growth growth{.site = site};
    for (int64_t at = last; steps.contains(at); --at) {
      growth.first_step = at;
      ++growth.steps;
      growth.blocks += steps.at(at).blocks;
      growth.bytes += steps.at(at).bytes;
    }
    if (growth.steps >= options.steps) {
      found.push_back(growth);
    }
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Growth& a, const Growth& b) { return a.bytes > b.bytes; });
  return found;
}

}  // namespace brimful::probes
