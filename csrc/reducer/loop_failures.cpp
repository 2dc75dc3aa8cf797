// How a plain loop's failures reach the other ranks, and theirs this one.
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "reducer/loop_driver.h"
#include "step/failures.h"

namespace brimful {
namespace {
constexpr int64_t kUnwindingPatience = 2000;  // ms
constexpr const char* kUnwinding = "an exception ended its loop (see that rank's own output)";

/// In a destructor, or where the error has a way of its own.
void announce(const std::function<void()>& action) noexcept {
  try {
    action();
  } catch (const std::exception& e) {
    log(LogLevel::error, std::string("could not announce the failure of this rank: ") + e.what());
  } catch (...) {
    log(LogLevel::error, "could not announce the failure of this rank");
  }
}
}  // namespace

void LoopDriver::publish_failure(FailureKind kind, const std::string& text) {
  const Failure failure{s_.link.rank, 0, s_.attempt.step, kind, text};
  if (step_.parting) {
    s_.link.board_of(step_.parting_number)
        .try_post(Turns::place_of(s_.turns.number, s_.link.rank), failure);
  } else {
    s_.link.board->try_post(failure);
  }
}

/// Throws on every rank if a rank failed the step, or the ranks' parameters differ; else notes who had data.
void LoopDriver::require_success(const Ending& ending) {
  const auto& records = ending.records;
  if (worst(records) < Status::retry) {
    if (!ending.divergence.empty()) {
      engine_.discard();
      detail::throw_plan_mismatch(ending.divergence);
    }
    note_data(records);
    step_.stops = stops(records);
    return;
  }
  engine_.discard();
  std::vector<Failure> failures;
  for (int rank = 0; rank < s_.link.world_size; ++rank) {
    if (records[rank].verdict >= Status::retry) {
      failures.push_back(posted_failure(*s_.link.board,
                                        FailureBoard::place_of(s_.attempt.step - 1, rank), rank,
                                        records[rank].verdict));
    }
  }
  throw_step_failed(s_.attempt.step - 1, failures);
}

void LoopDriver::end_failed_backward(const std::exception_ptr& error) {
  if (scope_.open) {  // there may be no error then
    step_.own_error = nullptr;
    scope_.died = true;
    return;
  }
  const auto failure = failure_of(error);
  step_.own_error = nullptr;  // which `error` may be
  abort_step(failure.kind, failure.text);
}

void LoopDriver::plain_backward_died() noexcept {
  announce([&] {
    if (s_.attempt.mode != Mode::plain) {
      return;
    }
    if (!s_.attempt.launching) {
      s_.attempt.mode = Mode::idle;
      return;
    }
    for (const auto& other : together()) {
      if (other->step_.own_error || other->scope_.open) {
        other->end_failed_backward(other->step_.own_error);
        return;
      }
    }
    // The error is not known here, but a refused allocation is evidence enough for its kind.
    const bool memory = memory::stats(s_.link.device).ooms > forward_.ooms_before;
    abort_step(memory ? Status::out_of_memory : Status::error,
               memory ? "an allocation was refused in backward" : "");
  });
}

void LoopDriver::abort_step(FailureKind kind, const std::string& text) {
  if (s_.link.traffic->several && !s_.link.alone && s_.attempt.mode != Mode::managed) {
    abort_turn(kind, text);
    return;
  }
  if (!text.empty()) {
    publish_failure(kind, text);
  }
  {
    const std::lock_guard<std::mutex> lock(s_.attempt.mutex);
    step_.said = {};
    step_.said.record.verdict = kind;
    forward_.open = false;
    forward_.due = false;
    step_.aborted = true;
    scope_.died = false;
    step_.unannounced.reset();
    if (s_.attempt.mode == Mode::idle) {
      engine_.take_up_plan();  // no backward has: the others' buckets are the new ones
      meet_behind_forward();
      engine_.start_backward(false);
    }
  }
  try {
    engine_.launch_early(Fill::anything);
    engine_.launch_last(Fill::anything, step_.said);
  } catch (...) {  // what the others wait for does not come: better they learn it
    s_.link.give_up(std::current_exception(), s_.attempt.step);
  }
  const std::lock_guard<std::mutex> lock(s_.attempt.mutex);
  s_.attempt.mode = Mode::idle;
  s_.attempt.launching = false;
}

void LoopDriver::settle_owed() {
  if (s_.link.broken) {
    return;
  }
  if (owes() && !step_.aborted) {
    abort_step(Status::error, kUnknownFailure);
  }
  settle();
}

void LoopDriver::settle() {
  if (!step_.aborted) {
    return;
  }
  publish_failure(Status::error, kUnknownFailure);  // kept only where nothing was posted yet
  step_.aborted = false;
  if (step_.parting) {
    settle_turn();
  } else {
    finish_step();
  }
  engine_.discard();
}

void LoopDriver::begin_scope() {
  settle();
  scope_.open = true;
  scope_.called_off = false;
  scope_.step = s_.attempt.step;
}

void LoopDriver::end_scope_ok() {
  scope_.open = false;
  if (scope_.died) {
    abort_step(Status::error, kUnknownFailure);  // its error was swallowed inside the scope
  }
}

void LoopDriver::end_scope_failed(FailureKind kind, const std::string& text) {
  scope_.open = false;
  if (std::exchange(scope_.called_off, false)) {
    return;
  }
  for (const auto& other : reducers_beside({}, s_.link.group.get())) {
    if (other->step_.parting) {
      other->publish_failure(kind, text);  // its step died in this scope, without a message
    } else if (other.get() != this && other->forward_.open && scope_.step != s_.attempt.step) {
      other->abort_step(kind, text);  // behind this one's backward
    }
  }
  if (scope_.step ==
      s_.attempt.step) {  // no collective of this step has ended: the other ranks wait for it
    announce_failure(kind, text, 0);
  } else if (step_.stands) {
    step_.unannounced = {s_.link.rank, 0, s_.attempt.step, kind, text};
  }
}

void LoopDriver::announce_failure(FailureKind kind, const std::string& text, int64_t patience_ms) {
  if (s_.link.alone) {
    return;
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(patience_ms);
  if (patience_ms > 0) {
    s_.link.hook_deadline = deadline;
  }
  if (step_.aborted) {
    publish_failure(kind, text);
  } else {
    abort_step(kind, text);
  }
  s_.link.hook_deadline.reset();
  const auto done = [&] {
    return (!step_.parting || step_.parting->work->isCompleted()) &&
           std::all_of(s_.layout.buckets.begin(), s_.layout.buckets.end(),
                       [](const auto& b) { return !b.work || b.work->isCompleted(); });
  };
  while (!done() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void LoopDriver::announce_unwinding() noexcept {
  announce([&] {
    if (!s_.link.broken && (owes() || (s_.attempt.plain && step_.stands))) {
      announce_failure(Status::error, kUnwinding, kUnwindingPatience);
    }
  });
}

bool LoopDriver::owes() const {
  return taken_.empty() && (step_.aborted || forward_.open || lost_backward() ||
                            (s_.attempt.mode == Mode::plain && s_.attempt.launching));
}

}  // namespace brimful
