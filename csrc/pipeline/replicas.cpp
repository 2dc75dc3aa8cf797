#include "pipeline/replicas.h"

#include <brimful/reducer/reducer.h>

#include <algorithm>
#include <unordered_map>

#include "pipeline/schedule/messages.h"

namespace brimful::pipeline {
namespace {
constexpr Action kNone{-1, ActionKind::forward, 0};

bool gives_gradients(const Action& action) {
  return gives_input_gradients(action.kind) || action.kind == ActionKind::backward_weight;
}

/// The last action of these stages that may give parameters gradients; none if several ranks have them.
Action last_of(const Schedule& schedule, const std::vector<int>& stages) {
  Action last = kNone;
  int ranks = 0;
  for (const auto& order : schedule.ranks) {
    const auto found = std::find_if(order.rbegin(), order.rend(), [&](const Action& action) {
      return gives_gradients(action) &&
             std::find(stages.begin(), stages.end(), action.stage) != stages.end();
    });
    if (found != order.rend()) {
      last = *found;
      ++ranks;
    }
  }
  return ranks == 1 ? last : kNone;
}
}  // namespace

bool Replicas::Reducer::has(int stage) const {
  return std::find(stages.begin(), stages.end(), stage) != stages.end();
}

Replicas::Replicas(const std::vector<std::shared_ptr<Participant>>& participants,
                   const std::vector<Stage>& stages, const std::vector<int>& numbers) {
  std::unordered_map<const c10::TensorImpl*, std::vector<int>> stages_of;
  for (size_t i = 0; i < stages.size(); ++i) {
    for (const auto& parameter : stages[i].parameters) {
      stages_of[parameter.unsafeGetTensorImpl()].push_back(numbers[i]);
    }
  }
  for (const auto& participant : participants) {
    TORCH_CHECK_VALUE(participant, "a reducer is missing (reducer: null)");
    Reducer reducer{participant, {}, kNone};
    for (const auto& parameter : participant->parameters()) {
      const auto found = stages_of.find(parameter.unsafeGetTensorImpl());
      TORCH_CHECK_VALUE(found != stages_of.end(),
                        "a reducer has a parameter that no stage of this process has (shape: ",
                        parameter.sizes(), "); give each stage all parameters that it uses");
      reducer.stages.insert(reducer.stages.end(), found->second.begin(), found->second.end());
    }
    std::sort(reducer.stages.begin(), reducer.stages.end());
    reducer.stages.erase(std::unique(reducer.stages.begin(), reducer.stages.end()),
                         reducer.stages.end());
    reducers_.push_back(std::move(reducer));
  }
  const auto is_reduced = [&](int stage) {
    return std::any_of(reducers_.begin(), reducers_.end(),
                       [&](const Reducer& reducer) { return reducer.has(stage); });
  };
  for (size_t i = 0; i < stages.size(); ++i) {
    const auto& own = stages[i].parameters;
    const bool trains =
        std::any_of(own.begin(), own.end(), [](const auto& p) { return p.requires_grad(); });
    TORCH_CHECK_VALUE(reducers_.empty() || !trains || is_reduced(numbers[i]),
                      "a stage's parameters are in no reducer, while other stages' are (stage: ",
                      numbers[i], "); wrap the modules of all stages");
  }
  const auto last_stage = [](const Reducer& reducer) {
    return reducer.stages.empty() ? -1 : reducer.stages.back();
  };
  std::stable_sort(reducers_.begin(), reducers_.end(), [&](const auto& one, const auto& other) {
    return last_stage(one) > last_stage(other);
  });
}

bool Replicas::is_broken() const {
  return std::any_of(reducers_.begin(), reducers_.end(), [](const Reducer& reducer) {
    const auto* known = dynamic_cast<const brimful::Reducer*>(reducer.participant.get());
    return known != nullptr && known->is_broken();
  });
}

std::vector<std::shared_ptr<Participant>> Replicas::participants() const {
  std::vector<std::shared_ptr<Participant>> all;
  all.reserve(reducers_.size());
  for (const auto& reducer : reducers_) {
    all.push_back(reducer.participant);
  }
  return all;
}

void Replicas::begin(const Schedule& schedule) {
  for (auto& reducer : reducers_) {
    reducer.last = last_of(schedule, reducer.stages);
  }
  left_ = 0;
  is_over_.assign(reducers_.size(), 0);
}

void Replicas::before(const Action& action) {
  for (const auto& reducer : reducers_) {
    if (reducer.has(action.stage)) {
      reducer.participant->attempt().begin_piece(action == reducer.last, {});
    }
  }
}

void Replicas::after(const Action& action) {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < reducers_.size(); ++i) {
    is_over_[i] |= action == reducers_[i].last ? 1 : 0;
  }
  while (left_ < reducers_.size() && is_over_[left_] != 0) {
    reducers_[left_++].participant->attempt().launch_early(Fill::gradients);
  }
}

}  // namespace brimful::pipeline
