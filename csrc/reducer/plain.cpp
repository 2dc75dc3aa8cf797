// A reducer in a plain loop: nobody drives it, so it finds the beginning of a backward in a hook on the module's output,
// its end in a callback of the engine, and a backward that died in the destruction of that callback.
#include <ATen/core/grad_mode.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "reducer/graph_hooks.h"
#include "reducer/reducer_state.h"
#include "step/no_capture.h"

namespace brimful {
namespace {
constexpr FailureBoard::Patience kTextPatience{1000};
constexpr int64_t kUnwindingPatience = 2000;  // ms
constexpr const char* kUnwinding = "an exception ended its loop (see that rank's own output)";
constexpr const char* kUnknown = "unknown (see that rank's own output)";
}  // namespace

void Reducer::prepare_forward() {
  auto& s = *s_;
  if (at::GradMode::is_enabled()) {
    require_no_capture(s.device, "a step of a wrapped model");
    require_not_taken();
  }
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    if (s.alone || (s.mode != State::Mode::idle && !s.died)) {
      return;
    }
  }
  if (s.died) {
    abort_step(Status::error, kUnknown);  // its error was swallowed inside the scope
  }
  if (s.forward_open && !s.aborted) {
    abort_step(Status::error, kUnknown);  // the last forward never ended
  }
  if (s.lost_backward() && !s.aborted) {
    abort_step(Status::out_of_memory,
               "an allocation was refused before backward reached the model");
  }
  settle();
  s.forward_open = s.sync && at::GradMode::is_enabled();
  s.begin_times();
}

void Reducer::forward_done() {
  auto& s = *s_;
  s.backward_due = s.forward_open;
  s.forward_open = false;
  s.ooms_before = memory::stats(s.device).ooms;
  const bool watched = std::exchange(s.watched, false);
  if (s.mode == State::Mode::idle && at::GradMode::is_enabled()) {
    s.passed = true;
    s.unseen += watched ? 0 : 1;
  }
}

// A forward may go without a backward, but one that was followed by a refused allocation has lost it.
bool Reducer::State::lost_backward() const {
  return backward_due && memory::stats(device).ooms > ooms_before;
}

void Reducer::watch(const at::Tensor& output) {
  {
    const std::lock_guard<std::mutex> lock(s_->mutex);
    if (s_->mode == State::Mode::managed) {
      return;  // the step says when backward begins
    }
  }
  const bool has_graph = begin_backward_at(output);
  s_->watched = s_->watched || has_graph;
}

/// Every backward that reaches the tensor is the step's. False for a leaf.
bool Reducer::begin_backward_at(const at::Tensor& tensor) {
  return on_backward(tensor, [weak = weak_from_this()] {
    if (const auto reducer = weak.lock()) {
      std::unique_lock<std::mutex> lock(reducer->s_->mutex);
      if (reducer->s_->mode == State::Mode::idle) {
        reducer->begin_plain_backward(lock, true);
      }
    }
  });
}

bool Reducer::begin_plain_backward(std::unique_lock<std::mutex>& lock, bool through_output) {
  auto& s = *s_;
  const bool due = through_output || !s.announced || s.passed || s.unseen > 0;
  const auto* selected = torch::autograd::get_current_graph_task_exec_info();
  if (s.alone || !due || selected == nullptr || !s.is_whole(*selected)) {
    return false;  // nothing to send, or not a training step's backward
  }
  require_not_taken();
  if (s.aborted) {  // what was launched for the step that died has left: only a wait
    lock.unlock();
    settle();
    lock.lock();
  }
  struct Guard {
    std::weak_ptr<Reducer> reducer;
    bool ended = false;
    ~Guard() {
      const auto alive = ended ? nullptr : reducer.lock();
      if (alive) {
        alive->plain_backward_died();
      }
    }
  };
  auto guard = std::make_shared<Guard>();
  guard->reducer = weak_from_this();
  torch::autograd::Engine::get_default_engine().queue_callback([guard = std::move(guard)] {
    guard->ended = true;
    if (const auto reducer = guard->reducer.lock()) {
      reducer->end_plain_backward();
    }
  });
  s.mode = State::Mode::plain;
  s.plain_step = true;
  s.forward_open = false;
  s.backward_due = false;
  s.passed = false;
  s.unseen = through_output ? 0 : std::max<int64_t>(s.unseen - 1, 0);
  s.ooms_before = memory::stats(s.device).ooms;
  s.scale = s.sparse_scale = s.wire_scale = s.hook_scale = 1.0;
  take_up_plan();
  s.own_error = nullptr;
  if (s.sync) {
    begin_plain_step(Status::ok);
  }
  start_backward(s.sync);
  return true;
}

void Reducer::begin_plain_step(Status verdict) {
  auto& s = *s_;
  s.plain_step = true;
  s.scale = s.wire_scale = 1.0 / s.predivide;
  s.sparse_scale = s.scale;
  s.hook_scale =
      s.world_size / s.predivide;  // it returns the mean, and all is scaled back at the end
  s.buffer_source = s.active.empty() ? 0 : s.active.front();
  s.late = false;
  s.said = {};
  s.said.record.verdict = verdict;
  s.said.record.weight = verdict == Status::ok ? 1 : 0;
  if (s.untold) {
    s.said.record.verdict = s.untold->kind;
    publish_failure(s.untold->kind, s.untold->text);
    s.untold.reset();
  }
  join_backward();
  meet_behind_forward();
}

/// Throws on every rank if a rank failed the step, or the ranks' parameters differ; else notes who had data.
void Reducer::require_success(const Ending& ending) {
  auto& s = *s_;
  const auto& records = ending.records;
  if (worst(records) < Status::retry) {
    if (!ending.divergence.empty()) {
      discard();
      detail::throw_plan_mismatch(ending.divergence);
    }
    note_data(records);
    return;
  }
  discard();
  int first = -1;
  bool memory = false;
  std::string words;
  for (int rank = 0; rank < s.world_size; ++rank) {
    if (records[rank].verdict < Status::retry) {
      continue;
    }
    const auto failure = s.board->await(FailureBoard::place_of(s.step - 1, rank), kTextPatience);
    if (first < 0) {
      first = rank;
      memory =
          records[rank].verdict == Status::out_of_memory || failure.kind == Status::out_of_memory;
    }
    words +=
        (words.empty() ? "rank " : "; rank ") + std::to_string(rank) + ": " + to_string(failure);
  }
  detail::throw_rank_failed(first, s.step - 1, memory ? Status::out_of_memory : Status::error,
                            "step " + std::to_string(s.step - 1) + " failed on " + words);
}

void Reducer::end_failed_backward(std::exception_ptr error) {
  auto& s = *s_;
  s.own_error = nullptr;
  if (s.in_scope) {
    s.died = true;
  } else {
    const auto failure = failure_of(error);
    abort_step(failure.kind, failure.text);
  }
}

void Reducer::plain_backward_died() noexcept {
  auto& s = *s_;
  try {
    if (s.mode != State::Mode::plain) {
      return;
    }
    if (!s.launching) {
      s.mode = State::Mode::idle;
      return;
    }
    for (const auto& other : together()) {
      if (other->s_->own_error || other->s_->in_scope) {
        other->end_failed_backward(other->s_->own_error);
        return;
      }
    }
    {
      // The error is not known here, but a refused allocation is evidence enough for its kind.
      const bool memory = memory::stats(s.device).ooms > s.ooms_before;
      abort_step(memory ? Status::out_of_memory : Status::error,
                 memory ? "an allocation was refused in backward" : "");
    }
  } catch (const std::exception& e) {
    log(LogLevel::error, std::string("could not announce the failure of this rank: ") + e.what());
  } catch (...) {
    log(LogLevel::error, "could not announce the failure of this rank");
  }
}

void Reducer::abort_step(FailureKind kind, const std::string& text) {
  auto& s = *s_;
  if (s.traffic->several && !s.alone && s.mode != State::Mode::managed) {
    abort_turn(kind, text);
    return;
  }
  if (!text.empty()) {
    publish_failure(kind, text);
  }
  {
    const std::lock_guard<std::mutex> lock(s.mutex);
    s.said = {};
    s.said.record.verdict = kind;
    s.forward_open = false;
    s.backward_due = false;
    s.aborted = true;
    s.died = false;
    s.untold.reset();
    if (s.mode == State::Mode::idle) {
      take_up_plan();  // no backward has: the others' buckets are the new ones
      meet_behind_forward();
      start_backward(false);
    }
  }
  try {
    launch_early(Fill::anything);
    launch_last(Fill::anything, s.said);
  } catch (...) {  // what the others wait for does not come: better they hear so
    break_chain(std::current_exception());
  }
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.mode = State::Mode::idle;
  s.launching = false;
}

/// Before another collective of the group: what the step that died here owes leaves first.
void Reducer::settle_owed() {
  auto& s = *s_;
  if (s.broken) {
    return;
  }
  if (owes() && !s.aborted) {
    abort_step(Status::error, kUnknown);
  }
  settle();
}

void Reducer::settle() {
  auto& s = *s_;
  if (!s.aborted) {
    return;
  }
  publish_failure(Status::error, kUnknown);  // kept only where no words were left yet
  s.aborted = false;
  if (s.parting) {
    settle_turn();
  } else {
    finish();
  }
  discard();
}

void Reducer::begin_scope() {
  settle();
  s_->in_scope = true;
  s_->called_off = false;
  s_->scope_step = s_->step;
}

void Reducer::end_scope_ok() {
  s_->in_scope = false;
  if (s_->died) {
    abort_step(Status::error, kUnknown);  // its error was swallowed inside the scope
  }
}

void Reducer::end_scope_failed(FailureKind kind, const std::string& text) {
  auto& s = *s_;
  s.in_scope = false;
  if (std::exchange(s.called_off, false)) {
    return;
  }
  for (const auto& other : reducers_beside({}, s.group.get())) {
    if (other->s_->parting) {
      other->publish_failure(kind, text);  // its step died in this scope, without words
    } else if (other.get() != this && other->s_->forward_open && s.scope_step != s.step) {
      other->abort_step(kind, text);  // behind this one's backward
    }
  }
  if (s.scope_step ==
      s.step) {  // no collective of this step has ended: the other ranks wait for it
    announce_failure(kind, text, 0);
  } else if (s.stands) {
    s.untold = {s.rank, 0, s.step, kind, text};
  }
}

void Reducer::announce_failure(FailureKind kind, const std::string& text, int64_t patience_ms) {
  auto& s = *s_;
  if (s.alone) {
    return;
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(patience_ms);
  if (patience_ms > 0) {
    s.hook_deadline = deadline;
  }
  if (s.aborted) {
    publish_failure(kind, text);
  } else {
    abort_step(kind, text);
  }
  s.hook_deadline.reset();
  const auto done = [&] {
    return (!s.parting || s.parting->work->isCompleted()) &&
           std::all_of(s.buckets.begin(), s.buckets.end(),
                       [](const auto& b) { return !b.work || b.work->isCompleted(); });
  };
  while (!done() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

/// An exception destroys the reducer: it left a plain loop between two steps, and the others come to the next one.
void Reducer::announce_unwinding() noexcept {
  auto& s = *s_;
  try {
    if (!s.broken && (owes() || (s.plain_step && s.stands))) {
      announce_failure(Status::error, kUnwinding, kUnwindingPatience);
    }
  } catch (const std::exception& e) {
    log(LogLevel::error, std::string("could not announce the failure of this rank: ") + e.what());
  } catch (...) {
    log(LogLevel::error, "could not announce the failure of this rank");
  }
}

bool Reducer::owes() const {
  return s_->taken.empty() && (s_->aborted || s_->forward_open || s_->lost_backward() ||
                               (s_->mode == State::Mode::plain && s_->launching));
}

void Reducer::set_sync(bool sync) {
  s_->sync = sync;
}

bool Reducer::sync() const {
  return s_->sync;
}

}  // namespace brimful
