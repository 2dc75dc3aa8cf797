// How a plain loop's steps end, and how failures reach the other ranks, and theirs this one.
#include "reducer/loop_step.h"

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

LoopStep::LoopStep(Engine& engine, const ReducerOptions& options)
    : engine_(engine),
      link_(engine.link()),
      attempt_(engine.attempt()),
      predivide_(options.gradient_predivide_factor.value_or(link_.world_size)),
      forwards_(link_, options.forwards_announced),
      uneven_(engine) {}

void LoopStep::take_sums(const std::vector<ControlRecord>& records, bool keeps) {
  step_.stands = true;
  uneven_.forget_meeting();
  if (const auto with_data = uneven_.note_data(records)) {
    drop_sums();
    call_off();
    uneven_.throw_ended(with_data);
  }
  step_.stops = stops(records);
  if (keeps) {
    engine_.step().accept(predivide_ / uneven_.averaged_over(), true);
  } else {
    engine_.step().accept_nothing();
  }
}

void LoopStep::drop_sums() {
  step_.stands = false;
  uneven_.forget_meeting();
  engine_.step().discard();
}

void LoopStep::call_off() {
  forwards_.close();
  scope_.called_off = scope_.open;
}

void LoopStep::publish_failure(FailureKind kind, const std::string& text) {
  const Failure failure{link_.rank, 0, attempt_.step(), kind, text};
  if (plain_ && plain_->has_parted()) {
    plain_->post_parting(link_, failure);
  } else {
    link_.board->try_post(failure);
  }
}

void LoopStep::note_all_know() {
  for (const auto& other : reducers_beside({}, link_.group.get())) {
    other->scope_.step = other->attempt_.step() - 1;
    other->step_.stands = false;
    other->forwards_.drop();
  }
}

void LoopStep::end_failed_backward(const std::exception_ptr& error) {
  if (scope_.open) {  // there may be no error then
    step_.own_error = nullptr;
    scope_.died = true;
    return;
  }
  const auto failure = failure_of(error);
  step_.own_error = nullptr;  // which `error` may be
  abort_step(failure.kind, failure.text);
}

void LoopStep::plain_backward_died() noexcept {
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

void LoopStep::abort_step(FailureKind kind, const std::string& text) {
  if (!attempt_.is_plain_step()) {
    plain_ = std::make_shared<PlainStep>(self_);
    const auto lock = attempt_.lock();
    if (attempt_.is_idle()) {
      uneven_.meet();
    }
    if (!attempt_.is_managed()) {  // no backward has taken up the others' buckets
      engine_.step().begin_plain({}, attempt_.buffer_source(), plain_, /*launches=*/false);
    }
  }
  const auto step = plain_;
  step->abort(*this, kind, text);
}

void LoopStep::note_died() {
  const auto lock = attempt_.lock();
  forwards_.drop();
  scope_.died = false;
  step_.unannounced.reset();
  step_.own_error = nullptr;
  step_.aborted = true;
}

void LoopStep::settle_owed() {
  if (link_.is_broken()) {
    return;
  }
  if (owes() && !step_.aborted) {
    abort_step(Status::error, kUnknownFailure);
  }
  settle();
}

void LoopStep::settle() {
  if (!step_.aborted) {
    return;
  }
  publish_failure(Status::error, kUnknownFailure);  // kept only where nothing was posted yet
  step_.aborted = false;
  uneven_.forget_meeting();
  if (const auto step = std::exchange(plain_, nullptr); step->has_parted()) {
    step->wait_for_parting(link_);
    step_.stands = false;
    engine_.step().give_up();
  } else {
    engine_.step().finish();
  }
  engine_.step().discard();
}

void LoopStep::begin_scope() {
  settle();
  scope_.open = true;
  scope_.called_off = false;
  scope_.step = attempt_.step();
}

void LoopStep::end_scope_ok() {
  scope_.open = false;
  if (scope_.died) {
    abort_step(Status::error, kUnknownFailure);  // its error was swallowed inside the scope
  }
}

void LoopStep::end_scope_failed(FailureKind kind, const std::string& text) {
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

void LoopStep::announce_failure(FailureKind kind, const std::string& text, int64_t patience_ms) {
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

void LoopStep::announce_unwinding() noexcept {
  announce([&] {
    if (!link_.is_broken() && (owes() || (attempt_.is_of_loop() && step_.stands))) {
      announce_failure(Status::error, kUnwinding, kUnwindingPatience);
    }
  });
}

bool LoopStep::owes() const {
  return taken_.empty() && (step_.aborted || forwards_.is_open() || forwards_.lost_backward() ||
                            attempt_.is_plain_step());
}

}  // namespace brimful
