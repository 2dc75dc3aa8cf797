#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reducer/bucket_set.h"
#include "reducer/group_link.h"
#include "reducer/hook_chain.h"
#include "reducer/planner.h"
#include "reducer/stopwatch.h"

namespace brimful {

/// How all ranks come to the same bucket plan without a collective: rank 0 puts a plan into the store and its number into
/// its control record; a step that all ranks accept makes all of them take it up when the next step begins.
class PlanTuner {
 public:
  PlanTuner(GroupLink& link, BucketSet& layout, HookChain& hooks)
      : link_(link), layout_(layout), hooks_(hooks) {}

  /// All ranks have agreed on this plan.
  void lay_out(BucketPlan plan);
  /// On rank 0, where the plan may change.
  void start(bool tune_sizes);
  void begin_backward() { arrivals_.clear(); }
  void note_gradient(int64_t parameter) {
    if (planner_ && !planner_->done()) {
      arrivals_.push_back(parameter);
    }
  }
  /// For the control record; 0: none.
  uint32_t proposed() const { return proposal_ ? proposals_ : 0; }
  /// A step stands: rank 0 may have learned a better plan.
  void propose(const Stopwatch& watch, int64_t step);
  /// All ranks have accepted the step whose record named this plan.
  void note_agreed(uint32_t number);
  /// A step begins: lays out what was agreed on since the last one.
  void take_up();
  /// The plan as it is is laid out anew when the next step begins, unless another one is agreed on.
  void repeat();
  /// The control record moves into a bucket of its own. What was learned with other options is of no use then.
  void separate_record();
  std::string report() const { return planner_ ? planner_->report() : ""; }

 private:
  std::string key_of(uint32_t number) const;

  GroupLink& link_;
  BucketSet& layout_;
  HookChain& hooks_;
  std::unique_ptr<Planner> planner_;    ///< rank 0, while the plan may change
  std::optional<BucketPlan> proposal_;  ///< rank 0: offered to the others in this step
  uint32_t proposals_ = 0;              ///< rank 0: so far
  std::optional<BucketPlan> next_;      ///< agreed
  std::vector<int64_t> arrivals_;       ///< parameters in the order of their gradients
};

}  // namespace brimful
