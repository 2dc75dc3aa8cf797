#pragma once
#include <brimful/reducer/plain_loop.h>
#include <brimful/reducer/reducer_options.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "reducer/engine.h"

namespace brimful {

class Reducer;
constexpr const char* kUnknownFailure = "unknown (see that rank's own output)";

/// Drives an engine in a plain loop, as a StepGroup does elsewhere: it finds the beginning of a backward in a hook on the
/// module's output, its end in a callback of autograd's engine, and a backward that died in the destruction of that
/// callback. Several of them that one backward reaches end it together (loop_turns.cpp).
class LoopDriver final : public PlainLoop, private EngineDriver {
 public:
  LoopDriver(Engine& engine, const ReducerOptions& options);
  /// Hooks and callbacks hold both weakly.
  void attach(std::weak_ptr<LoopDriver> self, std::weak_ptr<Engine> engine) {
    self_ = std::move(self);
    engine_.attach(std::move(engine), *this);
  }

  void prepare_forward() override;
  void watch(const at::Tensor& output) override;
  void forward_done() override;
  void set_sync(bool sync) override { sync_ = sync; }
  bool sync() const override { return sync_; }
  void begin_scope() override;
  void end_scope_ok() override;
  void end_scope_failed(FailureKind kind, const std::string& text) override;
  void announce_failure(FailureKind kind, const std::string& text, int64_t patience_ms) override;
  void publish_failure(FailureKind kind, const std::string& text) override;
  bool owes() const override;
  void begin_join(bool mean_of_active, bool throw_early) override;
  bool join_step(bool keep_gradients) override;
  void end_join() override;
  void require_data() override { require_all(true); }
  bool any_rank(bool own) override;
  void call_off() override;
  const std::vector<int>& active() const override { return join_.active; }
  bool stop() const override;

  const EngineState& state() const { return s_; }
  /// What a step that died here still owes.
  void settle();
  /// Before another collective of the group: what the step that died here owes is launched first.
  void settle_owed();
  /// A parameter has a later reducer: two would take a gradient in turns, and neither would know.
  void retire(const std::string& taken);
  /// An exception destroys the reducer: it left a plain loop between two steps, and the others come to the next one.
  void announce_unwinding() noexcept;

 private:
  struct ForwardState {
    bool announced = false;  ///< a backward of a forward that was not is this rank's own
    bool open = false;
    bool due = false;      ///< it has ended and no backward of the module has begun
    bool passed = false;   ///< as `due`, also where that backward does not synchronise
    bool watched = false;  ///< an output of the forward that ends has a graph
    int64_t unseen = 0;  ///< since then without one: their outputs do not say that backward begins
    int64_t ooms_before = 0;  ///< refused allocations before this backward
    bool warned = false;      ///< of a backward(inputs=...) of some parameters
  };
  struct ScopeState {
    bool open = false;
    bool called_off = false;  ///< it has no failure to announce
    bool died = false;        ///< a backward died inside of it; its end announces that
    int64_t step = 0;
  };
  struct JoinState {
    bool mean_of_active = false;         ///< gradients are the mean over those
    bool throw_early = false;            ///< a step without all ranks fails
    std::vector<int> active;             ///< ranks that had data in the last step
    c10::intrusive_ptr<c10d::Work> met;  ///< all ranks are behind their forward
  };
  struct StepState {
    Announcement said;
    bool stands = false;                 ///< the last backward's sums became gradients
    std::optional<Failure> unannounced;  ///< failed behind that: announced with the next step
    std::exception_ptr own_error;        ///< thrown by the reducer itself in this backward
    bool aborted = false;                ///< drained after a failure, not yet waited for
    int64_t begun = 0;                   ///< when its backward began, among the group's
    bool stops = false;                  ///< all ranks stop behind the last one
    std::optional<Exchange> parting;     ///< what this rank said when its step died
    uint64_t parting_number = 0;         ///< and of which reducer
  };

  friend class Reducer;  // which puts one loop in another's place, between two steps
  std::weak_ptr<Reducer> reducer_;
  void go_on_from(const LoopDriver& before);
  bool begin_backward(std::unique_lock<std::mutex>& lock) override;
  void note_error(std::exception_ptr error) override { step_.own_error = std::move(error); }
  void watch_gradient(const at::Tensor& gradient) override { begin_backward_at(gradient); }
  void give_way(bool to_step) override;
  [[noreturn]] void throw_turn_ended() override;

  void require_not_taken() const;
  bool begin_backward_at(const at::Tensor& tensor);
  bool begin_plain_backward(std::unique_lock<std::mutex>& lock, bool through_output);
  void watch_end_of_backward();
  bool lost_backward() const;
  bool is_whole(const std::unordered_map<torch::autograd::Node*,
                                         torch::autograd::GraphTask::ExecInfo>& selected);
  void begin_plain_step(Status verdict);
  void end_plain_backward();
  void plain_backward_died() noexcept;
  void end_failed_backward(const std::exception_ptr& error);
  void abort_step(FailureKind kind, const std::string& text);
  Ending finish_step();
  void take_sums();
  void require_success(const Ending& ending);
  std::vector<uint8_t> ask_all(uint8_t own, const std::string& what);
  void require_all(bool has_data);
  void meet_behind_forward();
  void join_without_gradients();
  void note_data(const std::vector<ControlRecord>& records);
  std::vector<std::shared_ptr<LoopDriver>> together();
  void join_backward();
  bool close_turn();
  void note_all_know();
  std::string step_of(const Turn& turn) const;
  void abort_turn(FailureKind kind, const std::string& text);
  void launch_and_part(const std::vector<std::shared_ptr<LoopDriver>>& all, FailureKind kind,
                       const std::string& text);
  void settle_turn();

  Engine& engine_;
  EngineState& s_;
  std::weak_ptr<LoopDriver> self_;
  double predivide_;   ///< gradients are divided by this before the sum
  std::string taken_;  ///< a parameter that a later reducer has taken over
  bool sync_ = true;
  ForwardState forward_;
  ScopeState scope_;
  JoinState join_;
  StepState step_;
};

}  // namespace brimful
