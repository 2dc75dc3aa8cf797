#pragma once
#include <exception>
#include <memory>
#include <optional>

#include "reducer/arrivals.h"
#include "reducer/launcher.h"
#include "reducer/record_transport.h"
#include "reducer/step_gate.h"
#include "reducer/updates.h"

namespace brimful {

/// Who begins the steps that no StepGroup begins. The engine asks it at the borders of steps, never within.
class EngineDriver {
 public:
  virtual ~EngineDriver() = default;
  /// A gradient has come outside of a step; `lock` is the attempt's. False: it stays this rank's own.
  virtual bool begin_backward(Attempt::Lock& lock) = 0;
  /// The engine has thrown this from the hook of a gradient, in a backward of the driver's.
  virtual void note_error(std::exception_ptr error) = 0;
  /// A loss of this gradient begins a backward too. False for a leaf.
  virtual bool watch_gradient(const at::Tensor& gradient) = 0;
  /// A step that the driver does not begin is about to, or an exchange: settles what the driver's own steps owe.
  virtual void give_way(bool to_step) = 0;
  /// The ranks are in steps of different models, or one has failed, as all of them know.
  [[noreturn]] virtual void throw_step_ended(const SharedStep& step) = 0;
};

/// What an engine consists of, and its step works with. Each keeps its own state.
struct EngineParts {
  explicit EngineParts(const Group& group) : link(group) {}

  GroupLink link;
  BucketSet layout;
  HookChain hooks{link};
  PlanTuner tuner{link, layout, hooks};
  Stopwatch watch;
  Attempt attempt;
  Placement placement{layout, hooks, attempt};
  Launcher launcher{link, layout, hooks, watch};
  std::unique_ptr<RecordTransport> transport;
  StepGate gate{link, attempt};
  Arrivals arrivals{{layout, attempt, placement, watch, tuner}};
  std::optional<Updates> updates;  ///< where there are other ranks
  EngineDriver* driver = nullptr;
};

}  // namespace brimful
