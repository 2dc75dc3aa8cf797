// Several reducers of a group in one plain backward: they launch in one order, and end it together (turns.h).
#include <brimful/error.h>
#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <utility>

#include "reducer/loop_driver.h"
#include "step/failures.h"

namespace brimful {

/// The reducers of the plain backward that runs, in the order in which they began; this one alone outside of one.
std::vector<std::shared_ptr<LoopDriver>> LoopDriver::together() {
  const auto runs = [](const LoopDriver& loop) {
    return loop.s_.attempt.mode == Mode::plain && loop.s_.attempt.launching;
  };
  if (!s_.link.traffic->several || !runs(*this)) {
    return {std::shared_ptr<LoopDriver>(self_)};
  }
  auto all = reducers_beside({}, s_.link.group.get());
  std::erase_if(all, [&](const auto& other) { return !runs(*other); });
  std::sort(all.begin(), all.end(),
            [](const auto& a, const auto& b) { return a->step_.begun < b->step_.begun; });
  return all;
}

/// Its buckets are launched behind those of the reducers that this backward has reached before.
void LoopDriver::join_backward() {
  engine_.set_order(nullptr, nullptr);
  s_.turns.reset();
  step_.begun = ++s_.link.traffic->begun;
  if (!s_.link.traffic->several) {
    return;
  }
  for (const auto& other : reducers_beside({}, s_.link.group.get())) {
    auto& theirs = other->s_.attempt;
    if (other.get() != this && theirs.mode == Mode::plain && theirs.launching &&
        theirs.after == nullptr) {
      s_.attempt.before = &other->engine_;
      theirs.after = &engine_;
      s_.turns.share_end_of(other->s_.turns);
    }
  }
}

/// True if the last buckets may be launched.
bool LoopDriver::close_turn() {
  auto& turns = s_.turns;
  if (!turns.closed && !turns.ended && s_.link.takes_turns()) {
    turns.agree({TurnKind::close});
    turns.closed = true;
  }
  return !turns.ended;
}

/// What this rank says of a turn in which another one is in a step.
std::string LoopDriver::step_of(const Turn& turn) const {
  if (turn.kind == TurnKind::close) {
    return "at the end of its backward";
  }
  std::string text = turn.kind == TurnKind::exchange ? "before a loop of " : "";
  text += "model " + std::to_string(turn.number);
  for (const auto& other : reducers_beside({}, s_.link.group.get())) {
    if (other->s_.link.number == turn.number) {
      text += " with parameter " + other->s_.layout.name_of(0);
    }
  }
  return text;
}

/// All ranks know why: a step of another model here, or a rank that failed.
void LoopDriver::throw_turn_ended() {
  note_all_know();
  step_.stands = false;
  std::vector<Failure> failures;
  std::string steps;
  for (int rank = 0; rank < s_.link.world_size; ++rank) {
    const auto& turn = s_.turns.said[rank];
    if (turn.kind == TurnKind::failed) {
      failures.push_back(posted_failure(s_.link.board_of(turn.number),
                                        Turns::place_of(s_.turns.number, rank), rank,
                                        static_cast<Status>(turn.detail)));
    } else {
      steps += (steps.empty() ? "rank " : ", rank ") + std::to_string(rank) + ": " + step_of(turn);
    }
  }
  if (!failures.empty()) {
    throw_step_failed(s_.attempt.step, failures);
  }
  throw PlanMismatch("the ranks are in steps of different models (" + steps +
                     "; numbers count wrappers of the group); run the models' backwards, and name "
                     "them to a BatchSizer, in one order on all ranks");
}

/// Every rank knows of this failure: no scope, and no forward that did not end, announces it again.
void LoopDriver::note_all_know() {
  for (const auto& other : reducers_beside({}, s_.link.group.get())) {
    other->scope_.step = other->s_.attempt.step - 1;
    other->step_.stands = other->forward_.open = other->forward_.due = false;
  }
}

void LoopDriver::end_plain_backward() {
  if (s_.attempt.mode != Mode::plain) {
    return;  // ended with another one's
  }
  if (!s_.attempt.launching) {
    s_.attempt.mode = Mode::idle;
    return;
  }
  const auto all = together();
  try {
    for (const auto& each : all) {
      each->engine_.launch_early(Fill::gradients);
      for (const auto& other : all) {
        other->s_.turns.share_end_of(each->s_.turns);
      }
    }
    close_turn();
    for (const auto& each : all) {
      each->s_.turns.share_end_of(s_.turns);
      each->s_.turns.closed = s_.turns.closed;
    }
    for (const auto& each : all) {
      if (!s_.turns.ended) {
        each->engine_.launch_last(Fill::gradients, each->step_.said);
      }
    }
  } catch (...) {
    end_failed_backward(std::current_exception());
    throw;
  }
  if (s_.turns.ended && !s_.link.broken) {
    all.front()->engine_.finish();  // throws, for all of them
  }
  std::exception_ptr error;
  for (const auto& each : all) {
    try {
      each->take_sums();
    } catch (...) {
      error = error ? error : std::current_exception();
    }
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

void LoopDriver::take_sums() {
  const auto ending = finish_step();
  step_.stands = worst(ending.records) < Status::retry && ending.divergence.empty();
  require_success(ending);
  const bool fewer = join_.mean_of_active && !join_.active.empty();
  engine_.accept(
      predivide_ / (fewer ? static_cast<double>(join_.active.size()) : s_.link.world_size), true);
}

/// This rank's step has died. What the ranks have agreed to send is launched; then it says so where they agree next, which
/// may be about another model.
void LoopDriver::abort_turn(FailureKind kind, const std::string& text) {
  const auto all = together();
  if (s_.attempt.mode == Mode::idle) {
    meet_behind_forward();
  }
  for (const auto& each : all) {
    const std::lock_guard<std::mutex> lock(each->s_.attempt.mutex);
    auto& step = each->step_;
    step.said = {};
    step.said.record.verdict = kind;
    step.own_error = nullptr;
    step.unannounced.reset();
    step.aborted = true;
    each->forward_.open = each->forward_.due = each->scope_.died = false;
    if (each->s_.attempt.mode == Mode::idle) {
      each->engine_.start_backward(false);  // none has: what waits for the buckets counts on it
    }
  }
  try {
    launch_and_part(all, kind, text);
  } catch (...) {  // what the others wait for does not come: better they learn it
    s_.link.give_up(std::current_exception(), s_.attempt.step);
  }
  for (const auto& each : all) {
    auto& state = each->s_;
    const std::lock_guard<std::mutex> lock(state.attempt.mutex);
    state.attempt.mode = Mode::idle;
    state.attempt.launching = false;
    state.turns.number = s_.turns.number;
    each->step_.parting = step_.parting;
    each->step_.parting_number = s_.link.number;
    each->engine_.set_order(nullptr, nullptr);
    state.link.broken = state.link.broken ? state.link.broken : s_.link.broken;
  }
  note_all_know();
}

void LoopDriver::launch_and_part(const std::vector<std::shared_ptr<LoopDriver>>& all,
                                 FailureKind kind, const std::string& text) {
  for (const auto& each : all) {
    if (each->s_.turns.opened && !s_.turns.closed) {
      each->engine_.launch_early(Fill::anything);
    }
  }
  if (s_.turns.closed) {
    for (const auto& each : all) {
      each->publish_failure(kind, text.empty() ? kUnknownFailure : text);
      each->engine_.launch_last(Fill::anything, each->step_.said);
    }
  } else if (!s_.turns.ended && !s_.link.broken) {
    const memory::UnlimitedEverywhere unlimited;
    step_.parting_number = s_.link.number;
    step_.parting = s_.turns.part(kind);
    if (!text.empty()) {
      publish_failure(kind, text);
    }
  }
}

void LoopDriver::settle_turn() {
  s_.link.waiting_since = GroupLink::Clock::now();
  s_.link.call([&] { s_.link.wait_for(*step_.parting->work, s_.link.device); });
  step_.parting.reset();
  step_.stands = false;
  engine_.give_up();
}

}  // namespace brimful
