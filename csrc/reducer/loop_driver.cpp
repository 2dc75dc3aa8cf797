// How a plain loop's steps begin and end.
#include "reducer/loop_driver.h"

#include <ATen/core/grad_mode.h>
#include <brimful/error.h>
#include <brimful/log.h>
#include <brimful/step/stop.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "reducer/graph_hooks.h"
#include "step/failures.h"
#include "step/no_capture.h"

namespace brimful {
namespace {
/// What this rank says of a turn in which another one is in a step.
std::string step_of(const Turn& turn, const GroupLink& link) {
  if (turn.kind == TurnKind::close) {
    return "at the end of its backward";
  }
  std::string text = turn.kind == TurnKind::exchange ? "before a loop of " : "";
  text += "model " + std::to_string(turn.number);
  for (const auto& other : reducers_beside({}, link.group.get())) {
    if (other->engine().link().number == turn.number) {
      text += " with parameter " + other->engine().layout().name_of(0);
    }
  }
  return text;
}

// autograd.grad leaves no gradient, and backward(inputs=...) of some parameters is this rank's own. All of them, as far as
// they can be inputs, are what a backward without inputs reaches.
bool is_whole(Engine& engine, const GradientHooks::Selected& selected, bool& warned) {
  if (selected.empty()) {
    return true;
  }
  const auto& parameters = engine.layout().parameters;
  const auto chosen = engine.gradient_hooks().reached_by(selected);
  const auto possible = static_cast<size_t>(
      std::count_if(parameters.begin(), parameters.end(),
                    [](const at::Tensor& parameter) { return parameter.requires_grad(); }));
  if (chosen > 0 && chosen < possible && !std::exchange(warned, true)) {
    log(LogLevel::warning,
        c10::str("the gradients of a backward of some parameters stay this rank's own (inputs: ",
                 chosen, " of ", possible,
                 " parameters); for gradients of all ranks pass all of them, or no inputs"));
  }
  return chosen > 0 && chosen >= possible;
}
}  // namespace

void LoopDriver::attach(std::weak_ptr<LoopDriver> self, const std::weak_ptr<Engine>& engine) {
  self_ = std::move(self);
  engine_.attach(engine, *this);
}

void LoopDriver::require_not_taken() const {
  TORCH_CHECK(taken_.empty(),
              "a later DistributedDataParallel reduces a parameter of this one (parameter: ",
              taken_, "); use the later one, or wrap one module that holds all parameters");
}

void LoopDriver::retire(const std::string& taken) {
  disown(this);
  engine_.gradient_hooks().remove();
  taken_ = taken;
}

void LoopDriver::go_on_from(const LoopDriver& before) {
  sync_ = before.sync_;
  scope_.open = before.scope_.open;
  scope_.step = attempt_.step();
  if (before.attempt_.is_uneven()) {
    uneven_.go_on_from(before.uneven_);
  }
}

void LoopDriver::give_way(bool to_step) {
  require_not_taken();
  settle();
  if (to_step) {
    forwards_.forget();
  }
}

/// All ranks know why: a step of another model here, or a rank that failed.
void LoopDriver::throw_step_ended(const SharedStep& step) {
  note_all_know();
  std::vector<Failure> failures;
  std::string steps;
  for (int rank = 0; rank < link_.world_size; ++rank) {
    const auto& turn = step.said()[rank];
    if (turn.kind == TurnKind::failed) {
      failures.push_back(step.failure_of(link_, turn, rank));
    } else {
      steps += (steps.empty() ? "rank " : ", rank ") + std::to_string(rank) + ": " +
               step_of(turn, link_);
    }
  }
  if (!failures.empty()) {
    throw_step_failed(attempt_.step(), failures);
  }
  throw PlanMismatch("the ranks are in steps of different models (" + steps +
                     "; numbers count wrappers of the group); run the models' backwards, and name "
                     "them to a BatchSizer, in one order on all ranks");
}

void LoopDriver::prepare_forward() {
  if (at::GradMode::is_enabled()) {
    require_no_capture(link_.device, "a step of a wrapped model");
    require_not_taken();
  }
  {
    const auto lock = attempt_.lock();
    if (link_.alone || (!attempt_.is_idle() && !scope_.died)) {
      return;
    }
  }
  if (scope_.died) {
    abort_step(Status::error, kUnknownFailure);  // its error was swallowed inside the scope
  }
  if (forwards_.is_open() && !step_.aborted) {
    abort_step(Status::error, kUnknownFailure);  // the last forward never ended
  }
  if (forwards_.lost_backward() && !step_.aborted) {
    abort_step(Status::out_of_memory,
               "an allocation was refused before backward reached the model");
  }
  settle();
  engine_.step().require_sums();
  forwards_.begin(sync_ && at::GradMode::is_enabled());
  engine_.watch().begin_step(link_.traffic->agreeing_ms);
}

bool LoopDriver::stop() const {
  return link_.alone ? stop_requested() : step_.stops;
}

void LoopDriver::forward_done() {
  forwards_.end(attempt_.is_idle() && at::GradMode::is_enabled());
}

void LoopDriver::watch(const at::Tensor& output) {
  {
    const auto lock = attempt_.lock();
    if (attempt_.is_managed()) {
      return;  // the step says when backward begins
    }
  }
  forwards_.note_output(watch_gradient(output));
}

/// Every backward that reaches the tensor is the step's. False for a leaf.
bool LoopDriver::watch_gradient(const at::Tensor& tensor) {
  return on_backward(tensor, [weak = self_] {
    if (const auto loop = weak.lock()) {
      auto lock = loop->attempt_.lock();
      if (loop->attempt_.is_idle()) {
        loop->begin_plain_backward(lock, true);
      }
    }
  });
}

/// Calls end_plain_backward(), or plain_backward_died().
void LoopDriver::watch_end_of_backward() {
  struct Guard {
    std::weak_ptr<LoopDriver> loop;
    bool ended = false;
    ~Guard() {
      const auto alive = ended ? nullptr : loop.lock();
      if (alive) {
        alive->plain_backward_died();
      }
    }
  };
  auto guard = std::make_shared<Guard>();
  guard->loop = self_;
  torch::autograd::Engine::get_default_engine().queue_callback([guard = std::move(guard)] {
    guard->ended = true;
    if (const auto loop = guard->loop.lock()) {
      loop->end_plain_backward();
    }
  });
}

bool LoopDriver::begin_plain_backward(Attempt::Lock& lock, bool through_output) {
  const bool due = through_output || forwards_.may_have_backward();
  const auto* selected = torch::autograd::get_current_graph_task_exec_info();
  if (link_.alone || !due || selected == nullptr || !is_whole(engine_, *selected, warned_)) {
    return false;  // nothing to send, or not a training step's backward
  }
  require_not_taken();
  if (step_.aborted) {  // what the step that died owes was launched: only a wait
    lock.unlock();
    settle();
    lock.lock();
  }
  watch_end_of_backward();
  attempt_.enter_plain_backward();
  forwards_.begin_backward(through_output);
  step_.own_error = nullptr;
  if (sync_) {
    begin_plain_step(Status::ok, /*launches=*/true);
  } else {
    engine_.step().begin_plain({}, attempt_.buffer_source(), nullptr, /*launches=*/false);
  }
  return true;
}

void LoopDriver::begin_plain_step(Status verdict, bool launches) {
  Scales scales;
  scales.gradients = scales.sparse = scales.wire = 1.0 / predivide_;
  scales.hook =
      link_.world_size / predivide_;  // it returns the mean, and all is scaled back at the end
  ControlRecord record;
  record.verdict = verdict;
  record.stop = stop_to_send();
  record.weight = verdict == Status::ok ? 1 : 0;
  plain_ = PlainStep::join(*this, self_, record);
  engine_.step().begin_plain(scales, uneven_.source(), plain_, launches);
  if (step_.unannounced) {
    plain_->fail(*step_.unannounced);
    step_.unannounced.reset();
  }
  uneven_.meet();
}

void LoopDriver::end_plain_backward() {
  if (!attempt_.is_plain()) {
    return;  // ended with another one's
  }
  if (!attempt_.launches()) {
    engine_.step().end_unsent_backward();
    return;
  }
  const auto step = plain_;
  try {
    step->launch(Fill::gradients);
  } catch (...) {
    end_failed_backward(std::current_exception());
    throw;
  }
  step->finish(/*keeps=*/true);
}

bool LoopDriver::join_step(bool keep_gradients) {
  require_not_taken();
  settle();
  require_all(false);
  {
    const auto lock = attempt_.lock();
    if (keep_gradients) {
      engine_.step().discard();
      attempt_.enter_plain_backward();
    }
    begin_plain_step(Status::no_data, /*launches=*/keep_gradients);
  }
  uneven_.wait_for_all();
  if (keep_gradients) {
    end_plain_backward();
  } else {
    const auto step = plain_;
    step->launch(Fill::zeros);
    step->finish(/*keeps=*/false);
  }
  const auto& records = engine_.transport().records();
  return std::any_of(records.begin(), records.end(),
                     [](const auto& record) { return record.verdict == Status::ok; });
}

void LoopDriver::begin_join(bool mean_of_active, bool throw_early) {
  uneven_.begin(mean_of_active, throw_early);
}

void LoopDriver::end_join() {
  uneven_.end();
  engine_.forget_updates();
}

bool LoopDriver::any_rank(bool own) {
  try {
    return uneven_.any_rank(own, "a step within a join");
  } catch (const std::exception&) {  // the group is broken: the forward is no step any more
    forwards_.close();
    throw;
  }
}

void LoopDriver::require_all(bool has_data) {
  int64_t with_data = 0;
  try {
    with_data = uneven_.remaining(has_data);
  } catch (const std::exception&) {  // as above
    forwards_.close();
    throw;
  }
  if (with_data > 0) {
    call_off();
    uneven_.throw_ended(with_data);
  }
}

}  // namespace brimful
