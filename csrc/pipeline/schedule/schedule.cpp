#include <brimful/pipeline/schedule.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace brimful::pipeline {
namespace {
template <typename Is>
bool has_any(const Schedule& schedule, const Is& is) {
  return std::any_of(schedule.ranks.begin(), schedule.ranks.end(), [&](const auto& actions) {
    return std::any_of(actions.begin(), actions.end(),
                       [&](const Action& action) { return is(action.kind); });
  });
}
}  // namespace

std::vector<int> rank_of_stage(const Schedule& schedule) {
  std::vector<int> ranks(std::max(schedule.stages, 0), -1);
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    for (const auto& action : schedule.ranks[rank]) {
      TORCH_CHECK_VALUE(
          action.stage >= 0 && action.stage < schedule.stages,
          "a schedule's action is of a stage that it does not have (schedule: ", schedule.name,
          ", stage: ", action.stage, ", stages: ", schedule.stages, "); set its number of stages");
      auto& known = ranks[action.stage];
      TORCH_CHECK_VALUE(known < 0 || known == static_cast<int>(rank),
                        "a stage is on two ranks (schedule: ", schedule.name,
                        ", stage: ", action.stage, ", ranks: ", known, " and ", rank,
                        "); keep all its actions on one");
      known = static_cast<int>(rank);
    }
  }
  return ranks;
}

bool has_communication(const Schedule& schedule) {
  return has_any(schedule, [](ActionKind kind) { return !is_compute(kind); });
}

bool has_backward(const Schedule& schedule) {
  return has_any(schedule,
                 [](ActionKind kind) { return is_compute(kind) && kind != ActionKind::forward; });
}

}  // namespace brimful::pipeline
