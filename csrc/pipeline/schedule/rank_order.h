#pragma once
#include <brimful/pipeline/schedule.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace brimful::pipeline {

/// A rank's actions as they are written down. Stages take their microbatches in order, each kind for itself. Those past
/// the last are counted and left out: an order for more microbatches without some of them is an order for the rest.
class RankOrder {
 public:
  explicit RankOrder(int microbatches) : microbatches_(microbatches) {}

  /// The next microbatch of `stage`: after I comes W, after B another I or B.
  void add(ActionKind kind, int stage) {
    const int microbatch = next(kind, stage)++;
    if (kind == ActionKind::backward) {
      ++next(ActionKind::backward_weight, stage);
    }
    add({stage, kind, microbatch});
  }
  void add(const Action& action) {
    if (action.microbatch < microbatches_) {
      actions_.push_back(action);
    }
  }
  /// How many of `kind` were added; B counts as I and as W.
  int count(ActionKind kind, int stage) { return next(kind, stage); }
  std::vector<Action> take() { return std::move(actions_); }

 private:
  int& next(ActionKind kind, int stage) {
    kind = kind == ActionKind::backward ? ActionKind::backward_input : kind;
    const auto known = std::find_if(next_.begin(), next_.end(), [&](const Action& action) {
      return action.stage == stage && action.kind == kind;
    });
    return known != next_.end() ? known->microbatch
                                : next_.emplace_back(Action{stage, kind, 0}).microbatch;
  }

  int microbatches_;
  std::vector<Action> actions_;
  std::vector<Action> next_;  ///< the next action of each kind and stage
};

}  // namespace brimful::pipeline
