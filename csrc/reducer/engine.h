#pragma once
#include <cstdint>
#include <memory>
#include <optional>

#include "reducer/engine_parts.h"
#include "reducer/engine_step.h"
#include "reducer/gradient_hooks.h"

namespace brimful {

/// A reducer's buckets and all that fills and sends them: takes gradients as they come (arrivals.h, place.h), and has a step
/// (engine_step.h). Its state is its own: others see some of the objects that it consists of, and change the attempt
/// by what these and the step do.
class Engine final {
 public:
  explicit Engine(const Group& group) : parts_(group) {}
  /// All ranks have agreed on the plan. `updates` compares the ranks' parameters; none: they are not compared.
  void set_up(BucketSet layout, BucketPlan plan, std::optional<Updates> updates);
  /// Adds the hooks of gradients, which hold `self` weakly.
  void attach(const std::weak_ptr<Engine>& self, EngineDriver& driver);

  GroupLink& link() { return parts_.link; }
  const GroupLink& link() const { return parts_.link; }
  Attempt& attempt() { return parts_.attempt; }
  const Attempt& attempt() const { return parts_.attempt; }
  const BucketSet& layout() const { return parts_.layout; }
  const RecordTransport& transport() const { return *parts_.transport; }
  GradientHooks& gradient_hooks() { return gradient_hooks_; }
  HookChain& hooks() { return parts_.hooks; }
  PlanTuner& tuner() { return parts_.tuner; }
  Stopwatch& watch() { return parts_.watch; }
  StepGate& gate() { return parts_.gate; }
  EngineStep& step() { return step_; }

  /// Before other collectives, between steps. `settles`: what the driver's own steps owe comes first.
  /// @throws PlanMismatch, RankFailed if the others are in a step
  void open_exchange(bool settles);
  /// All ranks set the same hook between steps, or none.
  void set_hook(std::unique_ptr<c10d::CommHookInterface> hook);
  bool replace_buffer(const at::Tensor& before, const at::Tensor& now) {
    return parts_.layout.tail->replace(before, now);
  }
  /// All ranks have the same parameters now.
  void forget_updates();

 private:
  void on_gradient(int64_t parameter, const at::Tensor& gradient);

  EngineParts parts_;
  GradientHooks gradient_hooks_;
  EngineStep step_{*this, parts_};
};

}  // namespace brimful
