#pragma once
#include <brimful/reducer/plain_loop.h>
#include <brimful/reducer/reducer_options.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reducer/engine.h"
#include "reducer/forwards.h"
#include "reducer/join.h"
#include "reducer/plain_step.h"

namespace brimful {

class Reducer;
constexpr const char* kUnknownFailure = "unknown (see that rank's own output)";

/// Drives an engine in a plain loop, as a StepGroup does elsewhere: it finds the beginning of a backward in a hook on the
/// module's output, its end in a callback of autograd's engine, and a backward that died in the destruction of that
/// callback. All of them that one backward reaches have one step (plain_step.h).
class LoopDriver final : public PlainLoop, private EngineDriver {
 public:
  LoopDriver(Engine& engine, const ReducerOptions& options);
  /// Hooks and callbacks hold both weakly.
  void attach(std::weak_ptr<LoopDriver> self, std::weak_ptr<Engine> engine);
  Engine& engine() const { return engine_; }
  /// Whose it is. None yet, or no more: null.
  void belong_to(std::weak_ptr<Reducer> reducer) { reducer_ = std::move(reducer); }
  std::shared_ptr<Reducer> reducer() const { return reducer_.lock(); }

  void publish_failure(FailureKind kind, const std::string& text) override;
  /// What a step that died here still owes.
  void settle();
  /// Before another collective of the group: what the step that died here owes is launched first.
  void settle_owed();
  /// A parameter has a later reducer: two would take a gradient in turns, and neither would know.
  void retire(const std::string& taken);
  bool is_retired() const { return !taken_.empty(); }
  /// Goes on in the place of a loop whose reducer took another group, between two steps.
  void go_on_from(const LoopDriver& before);
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

 private:
  // PlainLoop's, which a program calls.
  void prepare_forward() override;
  void watch(const at::Tensor& output) override;
  void forward_done() override;
  void set_sync(bool sync) override { sync_ = sync; }
  bool sync() const override { return sync_; }
  void begin_scope() override;
  void end_scope_ok() override;
  void end_scope_failed(FailureKind kind, const std::string& text) override;
  void announce_failure(FailureKind kind, const std::string& text, int64_t patience_ms) override;
  bool owes() const override;
  void begin_join(bool mean_of_active, bool throw_early) override;
  bool join_step(bool keep_gradients) override;
  void end_join() override;
  void require_data() override { require_all(true); }
  bool any_rank(bool own) override;
  void call_off() override;
  const std::vector<int>& active() const override { return uneven_.active(); }
  bool stop() const override;

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

  bool begin_backward(Attempt::Lock& lock) override { return begin_plain_backward(lock, false); }
  void note_error(std::exception_ptr error) override { step_.own_error = std::move(error); }
  void watch_gradient(const at::Tensor& gradient) override { begin_backward_at(gradient); }
  void give_way(bool to_step) override;
  [[noreturn]] void throw_step_ended(const SharedStep& step) override;

  void require_not_taken() const;
  bool begin_backward_at(const at::Tensor& tensor);
  bool begin_plain_backward(Attempt::Lock& lock, bool through_output);
  void watch_end_of_backward();
  bool is_whole(const GradientHooks::Selected& selected);
  void begin_plain_step(Status verdict, bool launches);
  void end_plain_backward();
  void plain_backward_died() noexcept;
  void end_failed_backward(const std::exception_ptr& error);
  std::string step_of(const Turn& turn) const;
  void abort_step(FailureKind kind, const std::string& text);
  void require_all(bool has_data);

  Engine& engine_;
  GroupLink& link_;
  Attempt& attempt_;
  std::weak_ptr<LoopDriver> self_;
  std::weak_ptr<Reducer> reducer_;
  double predivide_;   ///< gradients are divided by this before the sum
  std::string taken_;  ///< a parameter that a later reducer has taken over
  bool sync_ = true;
  bool warned_ = false;  ///< of a backward(inputs=...) of some parameters
  Forwards forwards_;
  UnevenData uneven_;
  ScopeState scope_;
  StepState step_;
  std::shared_ptr<PlainStep> plain_;  ///< of the last backward, or of what died in its place
};

}  // namespace brimful
