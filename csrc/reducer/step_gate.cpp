#include "reducer/step_gate.h"

#include <utility>

namespace brimful {

void StepGate::enter(std::shared_ptr<SharedStep> step) {
  step_ = std::move(step);
  opened_ = false;
}

void StepGate::enter_after(const StepGate* before) {
  const bool shares = before != nullptr && before->link_.group == link_.group;
  enter(shares ? before->step_ : std::make_shared<SharedStep>());
  step_->add(link_.number);
}

bool StepGate::open() {
  if (!opened_ && !step_->has_ended()) {
    share_error();
    if (link_.takes_turns()) {
      step_->open(link_, attempt_.is_managed());
      share_error();
    }
    opened_ = true;
  }
  return !step_->has_ended();
}

}  // namespace brimful
