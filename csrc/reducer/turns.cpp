// Several reducers of one group. What they send would match whatever another rank sends at the same time: a bucket of
// another model would be summed with this one's, or end the process (gloo). So before the first bucket of a step the
// ranks tell each other in a small all_gather which model it is of, and in a plain loop, before the last ones, that
// backward has ended; a rank whose step died says so in the place of either. A lone reducer does none of it.
#include <brimful/error.h>
#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "reducer/reducer_state.h"

namespace brimful {
namespace {
constexpr FailureBoard::Patience kTurnPatience{1000};  // with a rank's words

enum class TurnKind : uint64_t { plain, managed, close, exchange, failed };
enum TurnField : size_t { kind_field, number_field, chain_field, others_field, turn_fields };
constexpr auto status_field = chain_field;  // of a turn that failed

std::vector<uint8_t> as_record(const std::vector<uint64_t>& turn) {
  std::vector<uint8_t> bytes(kRecordBytes);  // gloo ends a process whose peer sends another size
  std::memcpy(bytes.data(), turn.data(), turn.size() * sizeof(uint64_t));
  return bytes;
}

uint64_t mixed(uint64_t hash, uint64_t number) {
  return (hash ^ number) * 1099511628211ULL;  // FNV-1a
}
}  // namespace

/// The reducers of the plain backward that runs, in the order in which they began; this one alone outside of one.
std::vector<std::shared_ptr<Reducer>> Reducer::together() {
  const auto runs = [](const Reducer& reducer) {
    return reducer.s_->mode == State::Mode::plain && reducer.s_->launching;
  };
  if (!s_->traffic->several || !runs(*this)) {
    return {shared_from_this()};
  }
  auto all = reducers_beside({}, s_->group.get());
  std::erase_if(all, [&](const auto& other) { return !runs(*other); });
  std::sort(all.begin(), all.end(),
            [](const auto& a, const auto& b) { return a->s_->begun < b->s_->begun; });
  return all;
}

/// Its buckets leave behind those of the reducers that this backward has reached before.
void Reducer::join_backward() {
  auto& s = *s_;
  s.before = nullptr;
  s.after = nullptr;
  s.opened = s.closed = s.ended = false;
  s.begun = ++s.traffic->begun;
  if (!s.traffic->several) {
    return;
  }
  for (const auto& other : reducers_beside({}, s.group.get())) {
    auto& o = *other->s_;
    if (other.get() != this && o.mode == State::Mode::plain && o.launching && o.after == nullptr) {
      s.before = other.get();
      o.after = this;
      hear_from(*other);
    }
  }
}

void Reducer::open_turn() {
  auto& s = *s_;
  if (s.opened || s.ended || s.broken || s.alone || !s.traffic->several) {
    return;
  }
  auto* const first = s.mode == State::Mode::managed ? dynamic_cast<Reducer*>(s.before) : nullptr;
  if (first != nullptr && first->s_->group == s.group) {  // it speaks for all of the step
    first->open_turn();
    hear_from(*first);
  } else {
    exchange_turn(static_cast<uint64_t>(s.mode == State::Mode::managed ? TurnKind::managed
                                                                       : TurnKind::plain));
  }
  s.opened = true;
}

/// True if the last buckets may leave.
bool Reducer::close_turn() {
  auto& s = *s_;
  if (!s.closed && !s.ended && !s.broken && !s.alone && s.traffic->several) {
    exchange_turn(static_cast<uint64_t>(TurnKind::close));
    s.closed = true;
  }
  return !s.ended;
}

/// Before records are exchanged, which is no step.
void Reducer::exchange_in_turn() {
  auto& s = *s_;
  if (s.broken || s.alone || !s.traffic->several) {
    return;
  }
  exchange_turn(static_cast<uint64_t>(TurnKind::exchange));
  if (std::exchange(s.ended, false)) {
    all_know();
    throw_turn_ended();
  }
}

void Reducer::exchange_turn(uint64_t kind) {
  auto& s = *s_;
  std::vector<uint64_t> own(turn_fields);
  own[kind_field] = kind;
  if (kind != static_cast<uint64_t>(TurnKind::close)) {
    own[number_field] = s.number;
    for (const auto* next = this;
         kind == static_cast<uint64_t>(TurnKind::managed) && next != nullptr;
         next = dynamic_cast<const Reducer*>(next->s_->after)) {
      own[chain_field] = mixed(own[chain_field], next->s_->number);
    }
  }
  own[others_field] = reducers_beside({}, s.group.get()).size() - 1;
  s.turn = s.traffic->turns++;
  s.waiting_since = std::chrono::steady_clock::now();
  try {
    const memory::Unlimited unlimited;
    s.require_group(s.device);
    const auto all = exchange_bytes(s.group, s.device, as_record(own),
                                    [&](c10d::Work& work) { wait_for(work, s.device); });
    s.turns.clear();
    bool others = false;
    for (const auto& bytes : all) {
      auto& turn = s.turns.emplace_back(turn_fields);
      std::memcpy(turn.data(), bytes.data(), turn_fields * sizeof(uint64_t));
      s.ended = s.ended || !std::equal(turn.begin(), turn.begin() + others_field, own.begin());
      others = others || turn[others_field] > 0;
    }
    if (!s.ended && !others && kind != static_cast<uint64_t>(TurnKind::plain)) {
      s.traffic->several = false;  // they have died on all ranks, as all ranks have read
    }
  } catch (...) {
    s.broken = std::current_exception();
  }
  s.traffic->agreeing_ms +=
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - s.waiting_since)
          .count();
}

/// All ranks know why: a step of another model here, or a rank that failed.
void Reducer::throw_turn_ended() {
  auto& s = *s_;
  int first = -1;
  bool memory = false;
  std::string failures;
  std::string steps;
  for (int rank = 0; rank < s.world_size; ++rank) {
    const auto& turn = s.turns[rank];
    const auto of_rank = "rank " + std::to_string(rank) + ": ";
    if (turn[kind_field] == static_cast<uint64_t>(TurnKind::failed)) {
      const auto failure =
          s.board_of(turn[number_field]).await(State::turn_place(s.turn, rank), kTurnPatience);
      memory = memory || failure.kind == Status::out_of_memory ||
               turn[status_field] == static_cast<uint64_t>(Status::out_of_memory);
      first = first < 0 ? rank : first;
      failures += (failures.empty() ? "" : "; ") + of_rank + to_string(failure);
      continue;
    }
    steps += (steps.empty() ? "" : ", ") + of_rank;
    if (turn[kind_field] == static_cast<uint64_t>(TurnKind::close)) {
      steps += "at the end of its backward";
      continue;
    }
    steps +=
        turn[kind_field] == static_cast<uint64_t>(TurnKind::exchange) ? "before a loop of " : "";
    steps += "model " + std::to_string(turn[number_field]);
    for (const auto& other : reducers_beside({}, s.group.get())) {
      if (other->s_->number == turn[number_field]) {
        steps += " with parameter " + other->s_->name_of(0);
      }
    }
  }
  if (first >= 0) {
    detail::throw_rank_failed(first, s.step, memory ? Status::out_of_memory : Status::error,
                              "step " + std::to_string(s.step) + " failed on " + failures);
  }
  throw PlanMismatch("the ranks are in steps of different models (" + steps +
                     "; numbers count wrappers of the group); run the models' backwards, and name "
                     "them to a BatchSizer, in one order on all ranks");
}

void Reducer::hear_from(const Reducer& other) {
  auto& s = *s_;
  const auto& o = *other.s_;
  s.broken = s.broken ? s.broken : o.broken;
  if (o.ended) {
    s.ended = true;
    s.turns = o.turns;
    s.turn = o.turn;
  }
}

/// Every rank has heard of this failure: no scope, and no forward that did not end, is to tell it again.
void Reducer::all_know() {
  for (const auto& other : reducers_beside({}, s_->group.get())) {
    auto& o = *other->s_;
    o.scope_step = o.step - 1;
    o.stands = o.forward_open = o.backward_due = false;
  }
}

/// All reducers of the step have stopped where this one has.
void Reducer::end_turn() {
  auto& s = *s_;
  all_know();
  auto* next = dynamic_cast<Reducer*>(s.after);
  give_up();
  while (next != nullptr) {
    auto* const following = dynamic_cast<Reducer*>(next->s_->after);
    next->wait_for_buckets();
    next->give_up();
    next = following;
  }
  throw_turn_ended();
}

/// The step leaves nothing behind, and is none. Its buckets have been waited for.
void Reducer::give_up() {
  auto& s = *s_;
  s.stands = false;
  end_attempt();
  --s.step;
  --s.counters.steps;
  discard();
}

void Reducer::end_plain_backward() {
  auto& s = *s_;
  if (s.mode != State::Mode::plain) {
    return;  // ended with another one's
  }
  if (!s.launching) {
    s.mode = State::Mode::idle;
    return;
  }
  const auto all = together();
  try {
    for (const auto& each : all) {
      each->launch_early(Fill::gradients);
      for (const auto& other : all) {
        other->hear_from(*each);
      }
    }
    close_turn();
    for (const auto& each : all) {
      each->hear_from(*this);
      each->s_->closed = s.closed;
    }
    for (const auto& each : all) {
      if (!s.ended) {
        each->launch_last(Fill::gradients, each->s_->said);
      }
    }
  } catch (...) {
    end_failed_backward(std::current_exception());
    throw;
  }
  if (s.ended && !s.broken) {
    all.front()->finish();  // throws, for all of them
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

void Reducer::take_sums() {
  auto& s = *s_;
  const auto ending = finish();
  s.stands = worst(ending.records) < Status::retry && ending.divergence.empty();
  require_success(ending);
  const bool fewer = s.mean_of_active && !s.active.empty();
  accept(s.predivide / (fewer ? static_cast<double>(s.active.size()) : s.world_size), true);
}

/// This rank's step has died. What the ranks have agreed to send leaves; then it says so where they agree next, which may
/// be about another model.
void Reducer::abort_turn(FailureKind kind, const std::string& text) {
  auto& s = *s_;
  const auto all = together();
  if (s.mode == State::Mode::idle) {
    meet_behind_forward();
  }
  for (const auto& each : all) {
    const std::lock_guard<std::mutex> lock(each->s_->mutex);
    auto& o = *each->s_;
    o.said = {};
    o.said.record.verdict = kind;
    o.forward_open = o.backward_due = o.died = false;
    o.own_error = nullptr;
    o.untold.reset();
    o.aborted = true;
    if (o.mode == State::Mode::idle) {
      each->start_backward(false);  // none has: what waits for the buckets counts on it
    }
  }
  try {
    for (const auto& each : all) {
      if (each->s_->opened && !s.closed) {
        each->launch_early(Fill::anything);
      }
    }
    if (s.closed) {
      for (const auto& each : all) {
        each->publish_failure(kind, text.empty() ? "unknown (see that rank's own output)" : text);
        each->launch_last(Fill::anything, each->s_->said);
      }
    } else if (!s.ended && !s.broken) {
      const memory::UnlimitedEverywhere unlimited;
      s.turn = s.traffic->turns++;
      s.parting_number = s.number;
      s.parting = begin_exchange(s.group, s.device,
                                 as_record({static_cast<uint64_t>(TurnKind::failed), s.number,
                                            static_cast<uint64_t>(kind), 1}));
      if (!text.empty()) {
        publish_failure(kind, text);
      }
    }
  } catch (...) {  // what the others wait for does not come: better they hear so
    break_chain(std::current_exception());
  }
  for (const auto& each : all) {
    const std::lock_guard<std::mutex> lock(each->s_->mutex);
    auto& o = *each->s_;
    o.mode = State::Mode::idle;
    o.launching = false;
    o.turn = s.turn;
    o.parting = s.parting;
    o.parting_number = s.number;
    o.before = o.after = nullptr;
    o.broken = o.broken ? o.broken : s.broken;
  }
  all_know();
}

void Reducer::settle_turn() {
  auto& s = *s_;
  s.waiting_since = std::chrono::steady_clock::now();
  try {
    wait_for(*s.parting->work, s.device);
  } catch (...) {
    s.broken = std::current_exception();
  }
  s.parting.reset();
  s.ended = true;
  wait_for_buckets();
  if (s.broken) {
    end_attempt();
    throw_broken(s.step - 1, "a step", describe(s.broken));
  }
  give_up();
}

}  // namespace brimful
