#include "reducer/loop_driver.h"

#include <ATen/core/grad_mode.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/step/stop.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "reducer/graph_hooks.h"
#include "step/no_capture.h"

namespace brimful {
LoopDriver::LoopDriver(Engine& engine, const ReducerOptions& options)
    : engine_(engine),
      s_(engine.state()),
      predivide_(options.gradient_predivide_factor.value_or(s_.link.world_size)) {
  forward_.announced = options.forwards_announced;
}

void LoopDriver::require_not_taken() const {
  TORCH_CHECK(taken_.empty(),
              "a later DistributedDataParallel reduces a parameter of this one (parameter: ",
              taken_, "); use the later one, or wrap one module that holds all parameters");
}

void LoopDriver::retire(const std::string& taken) {
  disown(this);
  engine_.remove_hooks();
  taken_ = taken;
}

void LoopDriver::go_on_from(const LoopDriver& before) {
  sync_ = before.sync_;
  scope_.open = before.scope_.open;
  scope_.step = s_.attempt.step;
  if (before.s_.attempt.uneven) {
    begin_join(before.join_.mean_of_active, before.join_.throw_early);
  }
}

void LoopDriver::give_way(bool to_step) {
  require_not_taken();
  settle();
  if (to_step) {
    forward_.open = forward_.due = forward_.passed = false;
    forward_.unseen = 0;
  }
}

void LoopDriver::prepare_forward() {
  if (at::GradMode::is_enabled()) {
    require_no_capture(s_.link.device, "a step of a wrapped model");
    require_not_taken();
  }
  {
    const std::lock_guard<std::mutex> lock(s_.attempt.mutex);
    if (s_.link.alone || (s_.attempt.mode != Mode::idle && !scope_.died)) {
      return;
    }
  }
  if (scope_.died) {
    abort_step(Status::error, kUnknownFailure);  // its error was swallowed inside the scope
  }
  if (forward_.open && !step_.aborted) {
    abort_step(Status::error, kUnknownFailure);  // the last forward never ended
  }
  if (lost_backward() && !step_.aborted) {
    abort_step(Status::out_of_memory,
               "an allocation was refused before backward reached the model");
  }
  settle();
  forward_.open = sync_ && at::GradMode::is_enabled();
  s_.begin_times();
}

bool LoopDriver::stop() const {
  return s_.link.alone ? stop_requested() : step_.stops;
}

void LoopDriver::forward_done() {
  forward_.due = forward_.open;
  forward_.open = false;
  forward_.ooms_before = memory::stats(s_.link.device).ooms;
  const bool watched = std::exchange(forward_.watched, false);
  if (s_.attempt.mode == Mode::idle && at::GradMode::is_enabled()) {
    forward_.passed = true;
    forward_.unseen += watched ? 0 : 1;
  }
}

// A forward may go without a backward, but one that was followed by a refused allocation has lost it.
bool LoopDriver::lost_backward() const {
  return forward_.due && memory::stats(s_.link.device).ooms > forward_.ooms_before;
}

void LoopDriver::watch(const at::Tensor& output) {
  {
    const std::lock_guard<std::mutex> lock(s_.attempt.mutex);
    if (s_.attempt.mode == Mode::managed) {
      return;  // the step says when backward begins
    }
  }
  const bool has_graph = begin_backward_at(output);
  forward_.watched = forward_.watched || has_graph;
}

/// Every backward that reaches the tensor is the step's. False for a leaf.
bool LoopDriver::begin_backward_at(const at::Tensor& tensor) {
  return on_backward(tensor, [weak = self_] {
    if (const auto loop = weak.lock()) {
      std::unique_lock<std::mutex> lock(loop->s_.attempt.mutex);
      if (loop->s_.attempt.mode == Mode::idle) {
        loop->begin_plain_backward(lock, true);
      }
    }
  });
}

// autograd.grad leaves no gradient, and backward(inputs=...) of some parameters is this rank's own. All of them, as far as
// they can be inputs, are what a backward without inputs reaches.
bool LoopDriver::is_whole(
    const std::unordered_map<torch::autograd::Node*, torch::autograd::GraphTask::ExecInfo>&
        selected) {
  if (selected.empty()) {
    return true;
  }
  size_t chosen = 0;
  size_t possible = 0;
  for (size_t i = 0; i < s_.layout.parameters.size(); ++i) {
    const auto found = selected.find(s_.accumulators[i].get());
    chosen += found != selected.end() && found->second.needed_ ? 1 : 0;
    possible += s_.layout.parameters[i].requires_grad() ? 1 : 0;
  }
  if (chosen > 0 && chosen < possible && !std::exchange(forward_.warned, true)) {
    log(LogLevel::warning,
        c10::str("the gradients of a backward of some parameters stay this rank's own (inputs: ",
                 chosen, " of ", possible,
                 " parameters); for gradients of all ranks pass all of them, or no inputs"));
  }
  return chosen > 0 && chosen >= possible;
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

bool LoopDriver::begin_backward(std::unique_lock<std::mutex>& lock) {
  return begin_plain_backward(lock, false);
}

bool LoopDriver::begin_plain_backward(std::unique_lock<std::mutex>& lock, bool through_output) {
  const bool due = through_output || !forward_.announced || forward_.passed || forward_.unseen > 0;
  const auto* selected = torch::autograd::get_current_graph_task_exec_info();
  if (s_.link.alone || !due || selected == nullptr || !is_whole(*selected)) {
    return false;  // nothing to send, or not a training step's backward
  }
  require_not_taken();
  if (step_.aborted) {  // what the step that died owes was launched: only a wait
    lock.unlock();
    settle();
    lock.lock();
  }
  watch_end_of_backward();
  s_.attempt.mode = Mode::plain;
  forward_.open = forward_.due = forward_.passed = false;
  forward_.unseen = through_output ? 0 : std::max<int64_t>(forward_.unseen - 1, 0);
  forward_.ooms_before = memory::stats(s_.link.device).ooms;
  engine_.begin_plain({}, s_.attempt.buffer_source);
  engine_.take_up_plan();
  step_.own_error = nullptr;
  if (sync_) {
    begin_plain_step(Status::ok);
  }
  engine_.start_backward(sync_);
  return true;
}

void LoopDriver::begin_plain_step(Status verdict) {
  Scales scales;
  scales.gradients = scales.sparse = scales.wire = 1.0 / predivide_;
  scales.hook =
      s_.link.world_size / predivide_;  // it returns the mean, and all is scaled back at the end
  engine_.begin_plain(scales, join_.active.empty() ? 0 : join_.active.front());
  step_.said = {};
  step_.said.record.verdict = verdict;
  step_.said.record.stop = stop_to_send();
  step_.said.record.weight = verdict == Status::ok ? 1 : 0;
  if (step_.unannounced) {
    step_.said.record.verdict = step_.unannounced->kind;
    publish_failure(step_.unannounced->kind, step_.unannounced->text);
    step_.unannounced.reset();
  }
  join_backward();
  meet_behind_forward();
}

Ending LoopDriver::finish_step() {
  auto ending = engine_.finish();
  join_.met.reset();
  return ending;
}

}  // namespace brimful
