// How a plain loop's failures reach the other ranks, and theirs this one.
#include <brimful/error.h>
#include <brimful/log.h>
#include <brimful/step/oom.h>

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
  const Failure failure{link_.rank, 0, attempt_.step(), kind, text};
  if (plain_ && plain_->has_parted()) {
    plain_->post_parting(link_, failure);
  } else {
    link_.board->try_post(failure);
  }
}

/// What this rank says of a turn in which another one is in a step.
std::string LoopDriver::step_of(const Turn& turn) const {
  if (turn.kind == TurnKind::close) {
    return "at the end of its backward";
  }
  std::string text = turn.kind == TurnKind::exchange ? "before a loop of " : "";
  text += "model " + std::to_string(turn.number);
  for (const auto& other : reducers_beside({}, link_.group.get())) {
    if (other->link_.number == turn.number) {
      text += " with parameter " + other->engine_.layout().name_of(0);
    }
  }
  return text;
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
      steps += (steps.empty() ? "rank " : ", rank ") + std::to_string(rank) + ": " + step_of(turn);
    }
  }
  if (!failures.empty()) {
    throw_step_failed(attempt_.step(), failures);
  }
  throw PlanMismatch("the ranks are in steps of different models (" + steps +
                     "; numbers count wrappers of the group); run the models' backwards, and name "
                     "them to a BatchSizer, in one order on all ranks");
}

/// Every rank knows of this failure: no scope, and no forward that did not end, announces it again.
void LoopDriver::note_all_know() {
  for (const auto& other : reducers_beside({}, link_.group.get())) {
    other->scope_.step = other->attempt_.step() - 1;
    other->step_.stands = false;
    other->forwards_.drop();
  }
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
    if (!attempt_.is_plain()) {
      return;
    }
    if (!attempt_.launches()) {
      attempt_.leave();
      return;
    }
    for (const auto& other : plain_->loops()) {
      if (other->step_.own_error || other->scope_.open) {
        other->end_failed_backward(other->step_.own_error);
        return;
      }
    }
    // The error is not known here, but a refused allocation is evidence enough for its kind.
    const bool memory = forwards_.ran_out();
    abort_step(memory ? Status::out_of_memory : Status::error,
               memory ? "an allocation was refused in backward" : "");
  });
}

void LoopDriver::abort_step(FailureKind kind, const std::string& text) {
  if (!attempt_.is_plain_step()) {
    plain_ = std::make_shared<PlainStep>(self_);
    const auto lock = attempt_.lock();
    if (attempt_.is_idle()) {
      uneven_.meet();
    }
    if (!attempt_.is_managed()) {  // no backward has taken up the others' buckets
      engine_.begin_plain({}, attempt_.buffer_source(), plain_, /*launches=*/false);
    }
  }
  const auto step = plain_;
  step->abort(*this, kind, text);
}

void LoopDriver::note_died() {
  const auto lock = attempt_.lock();
  forwards_.drop();
  scope_.died = false;
  step_.unannounced.reset();
  step_.own_error = nullptr;
  step_.aborted = true;
}

void LoopDriver::settle_owed() {
  if (link_.is_broken()) {
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
  uneven_.forget_meeting();
  if (const auto step = std::exchange(plain_, nullptr); step->has_parted()) {
    step->wait_for_parting(link_);
    step_.stands = false;
    engine_.give_up();
  } else {
    engine_.finish();
  }
  engine_.discard();
}

void LoopDriver::begin_scope() {
  settle();
  scope_.open = true;
  scope_.called_off = false;
  scope_.step = attempt_.step();
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
  for (const auto& other : reducers_beside({}, link_.group.get())) {
    if (other->plain_ && other->plain_->has_parted()) {
      other->publish_failure(kind, text);  // its step died in this scope, without a message
    } else if (other.get() != this && other->forwards_.is_open() &&
               scope_.step != attempt_.step()) {
      other->abort_step(kind, text);  // behind this one's backward
    }
  }
  if (scope_.step ==
      attempt_.step()) {  // no collective of this step has ended: the other ranks wait for it
    announce_failure(kind, text, 0);
  } else if (step_.stands) {
    step_.unannounced = {link_.rank, 0, attempt_.step(), kind, text};
  }
}

void LoopDriver::announce_failure(FailureKind kind, const std::string& text, int64_t patience_ms) {
  if (link_.alone) {
    return;
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(patience_ms);
  if (patience_ms > 0) {
    link_.end_hooks_at(deadline);
  }
  if (step_.aborted) {
    publish_failure(kind, text);
  } else {
    abort_step(kind, text);
  }
  link_.end_hooks_at(std::nullopt);
  const auto done = [&] {
    return (!plain_ || plain_->knows_parting()) && engine_.transport().has_ended();
  };
  while (!done() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void LoopDriver::announce_unwinding() noexcept {
  announce([&] {
    if (!link_.is_broken() && (owes() || (attempt_.is_of_loop() && step_.stands))) {
      announce_failure(Status::error, kUnwinding, kUnwindingPatience);
    }
  });
}

bool LoopDriver::owes() const {
  return taken_.empty() && (step_.aborted || forwards_.is_open() || forwards_.lost_backward() ||
                            attempt_.is_plain_step());
}

}  // namespace brimful
