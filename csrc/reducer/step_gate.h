#pragma once
#include <memory>

#include "reducer/attempt.h"
#include "reducer/group_link.h"
#include "reducer/shared_step.h"

namespace brimful {

/// The step that a reducer is in, with others of its group, and whether all ranks are in it: asked before anything of the
/// step leaves.
class StepGate {
 public:
  StepGate(GroupLink& link, const Attempt& attempt) : link_(link), attempt_(attempt) {}

  /// Of the reducers that a plain backward reaches.
  void enter(std::shared_ptr<SharedStep> step);
  /// A StepGroup's, in which the reducers of a group that follow each other share what they agree on; null: no reducer comes
  /// before this one.
  void enter_after(const StepGate* before);
  /// False: nothing of the step may leave.
  bool open();
  /// The ranks have agreed that they are in the step, or no rank asks.
  bool has_opened() const { return opened_; }
  /// What breaks the group for one reducer of the step has broken it for all.
  void share_error() { step_->share_error(link_); }
  SharedStep& step() { return *step_; }

 private:
  GroupLink& link_;
  const Attempt& attempt_;
  std::shared_ptr<SharedStep> step_ = std::make_shared<SharedStep>();
  bool opened_ = false;
};

}  // namespace brimful
