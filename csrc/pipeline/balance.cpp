#include <brimful/pipeline/balance.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace brimful::pipeline {
namespace {
/// Of stages: the costliest one, and the sum of squares, which is least where they are even.
using StageCosts = std::pair<double, double>;

void require_costs(const std::vector<double>& costs, int64_t stages) {
  TORCH_CHECK_VALUE(stages >= 1 && stages <= std::ssize(costs),
                    "every stage has a layer at least (stages: ", stages,
                    ", layers: ", costs.size(), "); ask for fewer stages");
  for (size_t i = 0; i < costs.size(); ++i) {
    TORCH_CHECK_VALUE(std::isfinite(costs[i]) && costs[i] >= 0,
                      "a layer's cost is a finite number and not negative (layer: ", i,
                      ", cost: ", costs[i], ")");
  }
}
}  // namespace

std::vector<int64_t> balanced(const std::vector<double>& costs, int64_t stages) {
  require_costs(costs, stages);
  const auto layers = std::ssize(costs);
  std::vector<double> before{0};  // each layer
  for (const double cost : costs) {
    before.push_back(before.back() + cost);
  }
  constexpr double kNone = std::numeric_limits<double>::infinity();
  // best[end]: of the first `end` layers in as many stages as have been taken; begins[stage][end]: where the last begins.
  std::vector<StageCosts> best(layers + 1, {kNone, kNone});
  best[0] = {0, 0};
  std::vector<std::vector<int64_t>> begins;
  for (int64_t stage = 0; stage < stages; ++stage) {
    std::vector<StageCosts> next(layers + 1, {kNone, kNone});
    auto& begin_of = begins.emplace_back(layers + 1, 0);
    for (int64_t end = stage + 1; end <= layers; ++end) {
      for (int64_t begin = stage; begin < end; ++begin) {
        const double own = before[end] - before[begin];
        const StageCosts found{std::max(best[begin].first, own), best[begin].second + own * own};
        if (found < next[end]) {
          next[end] = found;
          begin_of[end] = begin;
        }
      }
    }
    best = std::move(next);
  }
  std::vector<int64_t> counts(stages);
  auto end = layers;
  for (int64_t stage = stages; stage-- > 0;) {
    const auto begin = begins[stage][end];
    counts[stage] = end - begin;
    end = begin;
  }
  return counts;
}

}  // namespace brimful::pipeline
