#include <brimful/pipeline/checker.h>
#include <brimful/pipeline/simulate.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "pipeline/schedule/messages.h"
#include "pipeline/schedule/walk.h"

namespace brimful::pipeline {
namespace {
using Kind = ActionKind;

std::vector<double> by_stage(const std::vector<double>& values, int stages, const char* name) {
  TORCH_CHECK_VALUE(values.size() == 1 || values.size() == static_cast<size_t>(stages),
                    "costs are one value, or one for each stage (", name, ": ", values.size(),
                    " values, stages: ", stages, ")");
  for (const double value : values) {
    TORCH_CHECK_VALUE(std::isfinite(value) && value >= 0,
                      "a cost must be finite and not negative (", name, ": ", value, ")");
  }
  return values.size() == 1 ? std::vector<double>(stages, values[0]) : values;
}

/// Costs with a value for each stage.
struct StageCosts {
  StageCosts(const Costs& costs, int stages)
      : forward(by_stage(costs.forward, stages, "forward")),
        input(by_stage(costs.backward_input, stages, "backward_input")),
        weight(by_stage(costs.backward_weight, stages, "backward_weight")),
        whole(stages),
        activation(by_stage(costs.activation, stages, "activation")) {
    std::transform(input.begin(), input.end(), weight.begin(), whole.begin(), std::plus<>());
    if (!costs.backward.empty()) {
      whole = by_stage(costs.backward, stages, "backward");
    }
    TORCH_CHECK_VALUE(std::isfinite(costs.hop) && costs.hop >= 0,
                      "hop must be finite and not negative (hop: ", costs.hop, ")");
    TORCH_CHECK_VALUE(costs.input_share >= 0 && costs.input_share <= 1,
                      "input_share must be between 0 and 1 (input_share: ", costs.input_share, ")");
  }

  double of(const Action& action) const {
    switch (action.kind) {
      case Kind::forward:
        return forward[action.stage];
      case Kind::backward:
        return whole[action.stage];
      case Kind::backward_input:
        return input[action.stage];
      case Kind::backward_weight:
        return weight[action.stage];
      default:
        return 0;
    }
  }

  std::vector<double> forward, input, weight, whole, activation;
};

/// What an action leaves behind (1: the activations of a microbatch) or frees.
double held_by(Kind kind, double input_share) {
  switch (kind) {
    case Kind::forward:
      return 1;
    case Kind::backward:
      return -1;
    case Kind::backward_input:
      return -input_share;
    case Kind::backward_weight:
      return input_share - 1;
    default:
      return 0;
  }
}

void add_peaks(Timeline& timeline, const StageCosts& costs, double input_share, bool keeps) {
  timeline.peak_live.assign(timeline.stages, 0);
  std::vector<double> live(timeline.stages);
  for (const auto& actions : timeline.ranks) {
    double bytes = 0;
    double peak = 0;
    for (const auto& [action, start, end] : actions) {
      const double held = held_by(action.kind, input_share);
      const int stage = action.stage;
      live[stage] += held;
      bytes += held * costs.activation[stage];
      timeline.peak_live[stage] = std::max(timeline.peak_live[stage], live[stage]);
      peak = std::max(peak, bytes);
      if (!keeps) {  // no backward comes for what a forward leaves
        live[stage] = bytes = 0;
      }
    }
    timeline.peak_bytes.push_back(peak);
  }
}

void add_times(Timeline& timeline) {
  for (const auto& actions : timeline.ranks) {
    double busy = 0;
    double first = -1;
    double last = 0;
    for (const auto& [action, start, end] : actions) {
      if (is_compute(action.kind)) {
        first = first < 0 ? start : first;
        last = end;
        busy += end - start;
      }
      timeline.makespan = std::max(timeline.makespan, end);
    }
    timeline.period = std::max(timeline.period, last - std::max(first, 0.0));
    timeline.busy.push_back(busy);
  }
}
}  // namespace

double Timeline::bubble() const {
  const double all = std::accumulate(busy.begin(), busy.end(), 0.0);
  return makespan > 0 ? 1 - all / (makespan * static_cast<double>(busy.size())) : 0;
}

Timeline simulate(const Schedule& schedule, const Costs& costs) {
  require_valid(schedule, {std::nullopt, ChannelKind::by_message});
  const StageCosts stage_costs(costs, schedule.stages);
  const Places places(schedule);
  const auto needs = needs_of(places, ChannelKind::by_message, std::nullopt);
  Timeline timeline;
  timeline.name = schedule.name;
  timeline.stages = schedule.stages;
  timeline.microbatches = schedule.microbatches;
  timeline.ranks.resize(schedule.ranks.size());
  std::vector<double> ends(places.size());  // of a receive: when its message is there
  walk(places, needs, [&](int place) {
    auto& actions = timeline.ranks[places.rank(place)];
    const auto& action = places.action(place);
    const double free = actions.empty() ? 0 : actions.back().end;
    const int giver = needs[place].place;
    double there = giver < 0 ? 0 : ends[giver] + costs.hop;
    if (is_compute(action.kind)) {
      const int receive = costs.receives_wait ? -1 : places.find(receive_for(action));
      there = receive < 0 ? there : ends[receive];
      const double start = std::max(free, there);
      ends[place] = start + stage_costs.of(action);
      actions.push_back({action, start, ends[place]});
    } else {
      ends[place] = std::max(free, there);
      actions.push_back({action, free, costs.receives_wait ? ends[place] : free});
    }
  });
  add_times(timeline);
  add_peaks(timeline, stage_costs, costs.input_share, has_backward(schedule));
  return timeline;
}

}  // namespace brimful::pipeline
