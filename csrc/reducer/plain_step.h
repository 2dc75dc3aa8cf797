#pragma once
#include <brimful/step/participant.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reducer/shared_step.h"

namespace brimful {
class LoopStep;

/// The step of a plain backward: of the reducers of a group that it reaches, in the order in which it does. They launch in
/// that order and end together, as the participants of a StepGroup do.
class PlainStep final : public SharedStep {
 public:
  explicit PlainStep(std::weak_ptr<LoopStep> first, const ControlRecord& record = {})
      : loops_{std::move(first)}, said_{record, {}} {}
  /// The group's step that runs, with this reducer too, or a new one. `record`: what the rank says of it.
  static std::shared_ptr<PlainStep> join(LoopStep& loop, const std::weak_ptr<LoopStep>& self,
                                         const ControlRecord& record);
  std::vector<std::shared_ptr<LoopStep>> loops() const;
  /// An earlier failure of this rank makes the step fail.
  void fail(const Failure& failure);

  /// Backward has ended: what it owes is launched.
  void launch(Fill fill);
  /// Waits for the sums, which become the gradients; or not, on a rank that only made the others' collectives.
  /// @throws what the ranks raise of a step that failed, on all of them
  void finish(bool keeps);
  /// This rank's step has died: what the ranks have agreed to send is launched, and they learn of it with the last buckets
  /// or where they agree next.
  void abort(LoopStep& by, FailureKind kind, const std::string& text);

 private:
  void publish_failure() const;

  std::vector<std::weak_ptr<LoopStep>> loops_;
  Announcement said_;
  std::optional<Failure> failure_;
  bool over_ = false;
};

}  // namespace brimful
