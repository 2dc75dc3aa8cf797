#pragma once
#include <brimful/reducer/plain_loop.h>
#include <brimful/reducer/reducer_options.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reducer/engine.h"
#include "reducer/forwards.h"
#include "reducer/join.h"
#include "reducer/plain_step.h"

namespace brimful {

class LoopDriver;
constexpr const char* kUnknownFailure = "unknown (see that rank's own output)";

/// A reducer's part of a plain loop's steps, once they have begun: they stand or fail on all ranks, and this one launches
/// and says what it owes the others, whatever fails here.
class LoopStep : public PlainLoop {
 public:
  Engine& engine() const { return engine_; }

  void publish_failure(FailureKind kind, const std::string& text) override;
  /// What a step that died here still owes.
  void settle();
  /// Before another collective of the group: what the step that died here owes is launched first.
  void settle_owed();
  /// An exception destroys the reducer: it left a plain loop between two steps, and the others come to the next one.
  void announce_unwinding() noexcept;

  // For the step that this reducer is in.
  /// The sums of a step that stands become the gradients; without `keeps` they are left.
  void take_sums(const std::vector<ControlRecord>& records, bool keeps);
  void drop_sums();
  /// This rank's step has died, which is no more than a wait away from its end.
  void note_died();
  /// Every rank knows of the failure: no scope, and no forward that did not end, announces it again.
  void note_all_know();

 protected:
  LoopStep(Engine& engine, const ReducerOptions& options);

  // PlainLoop's, which a program calls.
  void begin_scope() override;
  void end_scope_ok() override;
  void end_scope_failed(FailureKind kind, const std::string& text) override;
  void announce_failure(FailureKind kind, const std::string& text, int64_t patience_ms) override;
  bool owes() const override;
  void call_off() override;

  struct ScopeState {
    bool open = false;
    bool called_off = false;  ///< it has no failure to announce
    bool died = false;        ///< a backward died inside of it; its end announces that
    int64_t step = 0;
  };
  struct StepState {
    bool stands = false;                 ///< the last backward's sums became gradients
    std::optional<Failure> unannounced;  ///< failed after that: announced with the next step
    std::exception_ptr own_error;        ///< thrown by the reducer itself in this backward
    bool aborted = false;                ///< drained after a failure, not yet waited for
    bool stops = false;                  ///< all ranks stop after the last one
  };

  void plain_backward_died() noexcept;
  void end_failed_backward(const std::exception_ptr& error);
  void abort_step(FailureKind kind, const std::string& text);

  Engine& engine_;
  GroupLink& link_;
  Attempt& attempt_;
  std::weak_ptr<LoopDriver> self_;
  double predivide_;   ///< gradients are divided by this before the sum
  std::string taken_;  ///< a parameter that a later reducer has taken over
  Forwards forwards_;
  UnevenData uneven_;
  ScopeState scope_;
  StepState step_;
  std::shared_ptr<PlainStep> plain_;  ///< of the last backward, or of what died in its place
};

}  // namespace brimful
