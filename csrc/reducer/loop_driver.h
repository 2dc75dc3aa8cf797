#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "reducer/loop_step.h"

namespace brimful {

class Reducer;

/// Drives an engine in a plain loop, as a StepGroup does elsewhere: it finds the beginning of a backward in a hook on the
/// module's output, its end in a callback of autograd's engine, and a backward that died in the destruction of that
/// callback. All of them that one backward reaches have one step (plain_step.h).
class LoopDriver final : public LoopStep, private EngineDriver {
 public:
  LoopDriver(Engine& engine, const ReducerOptions& options) : LoopStep(engine, options) {}
  /// Hooks and callbacks hold both weakly.
  void attach(std::weak_ptr<LoopDriver> self, const std::weak_ptr<Engine>& engine);
  /// Whose it is. None yet, or no more: null.
  void belong_to(std::weak_ptr<Reducer> reducer) { reducer_ = std::move(reducer); }
  std::shared_ptr<Reducer> reducer() const { return reducer_.lock(); }

  /// A parameter has a later reducer: two would take a gradient in turns, and neither would know.
  void retire(const std::string& taken);
  bool is_retired() const { return !taken_.empty(); }
  /// Goes on in the place of a loop whose reducer took another group, between two steps.
  void go_on_from(const LoopDriver& before);

 private:
  // PlainLoop's, which a program calls.
  void prepare_forward() override;
  void watch(const at::Tensor& output) override;
  void forward_done() override;
  void set_sync(bool sync) override { sync_ = sync; }
  bool sync() const override { return sync_; }
  void begin_join(bool mean_of_active, bool throw_early) override;
  bool join_step(bool keep_gradients) override;
  void end_join() override;
  void require_data() override { require_all(true); }
  bool any_rank(bool own) override;
  const std::vector<int>& active() const override { return uneven_.active(); }
  bool stop() const override;

  bool begin_backward(Attempt::Lock& lock) override { return begin_plain_backward(lock, false); }
  void note_error(std::exception_ptr error) override { step_.own_error = std::move(error); }
  bool watch_gradient(const at::Tensor& gradient) override;
  void give_way(bool to_step) override;
  [[noreturn]] void throw_step_ended(const SharedStep& step) override;

  void require_not_taken() const;
  bool begin_plain_backward(Attempt::Lock& lock, bool through_output);
  void watch_end_of_backward();
  void begin_plain_step(Status verdict, bool launches);
  void end_plain_backward();
  void require_all(bool has_data);

  std::weak_ptr<Reducer> reducer_;
  bool sync_ = true;
  bool warned_ = false;  ///< of a backward(inputs=...) of some parameters
};

}  // namespace brimful
