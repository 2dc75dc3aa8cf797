#include "pipeline/schedule/findings.h"

#include <brimful/pipeline/schedule_text.h>

#include <algorithm>

#include "pipeline/schedule/messages.h"

namespace brimful::pipeline {
namespace {
constexpr size_t kMost = 20;
using Kind = ActionKind;

/// What is wrong with the backward of a stage and microbatch; empty: nothing.
std::string backward_problem(const Places& places, int stage, int microbatch) {
  const Action whole{stage, Kind::backward, microbatch};
  const Action input{stage, Kind::backward_input, microbatch};
  const Action weight{stage, Kind::backward_weight, microbatch};
  const bool has_whole = places.find(whole) >= 0;
  const bool has_input = places.find(input) >= 0;
  const bool has_weight = places.find(weight) >= 0;
  if (has_whole && (has_input || has_weight)) {
    return to_string(whole) + " and " + to_string(has_input ? input : weight) + " are both there";
  }
  if (has_whole || (has_input && has_weight)) {
    return "";
  }
  if (!has_input && !has_weight) {
    return to_string(whole) + " is missing, or " + to_string(input) + " and " + to_string(weight);
  }
  return to_string(has_input ? weight : input) + " is missing beside " +
         to_string(has_input ? input : weight);
}

/// The send and the receive of what F, B or I at `place` makes.
void find_missing_message(const Places& places, int place, const std::vector<int>& ranks,
                          Findings& findings) {
  const auto& action = places.action(place);
  const int stage = taker_of(action);
  if (stage < 0 || stage >= places.schedule().stages || ranks[stage] < 0 ||
      ranks[stage] == places.rank(place)) {
    return;
  }
  const auto send = send_of(action);
  for (const auto& end : {send, other_end(send)}) {
    if (places.find(end) < 0) {
      findings.add(to_string(end) + " is missing: stage " + std::to_string(action.stage) +
                   " is on rank " + std::to_string(places.rank(place)) + ", stage " +
                   std::to_string(stage) + " on rank " + std::to_string(ranks[stage]));
    }
  }
}

/// A send or receive that has nothing to do.
void find_idle_message(const Places& places, int place, const std::vector<int>& ranks, bool trains,
                       Findings& findings) {
  const auto& action = places.action(place);
  const int stage = other_end(action).stage;
  if (stage < 0 || stage >= places.schedule().stages) {
    findings.add(places.full_text(place) + " has no other end: stage " +
                 std::to_string(action.stage) + " is the " + (stage < 0 ? "first" : "last"));
  } else if (ranks[stage] == places.rank(place)) {
    findings.add(places.full_text(place) + " is between stages of one rank, which send nothing");
  } else if (!is_forward(action.kind) && !trains) {
    findings.add(places.full_text(place) + " is in a schedule without backwards");
  }
}

std::vector<int> first_rank_of_stages(const Places& places) {
  std::vector<int> ranks(places.schedule().stages, -1);
  for (int place = places.size() - 1; place >= 0; --place) {
    ranks[places.action(place).stage] = places.rank(place);
  }
  return ranks;
}

/// What must come before an action in its rank, where that has it.
std::vector<Action> needed_before(const Action& action) {
  const auto [stage, kind, microbatch] = action;
  switch (kind) {
    case Kind::forward:
      return {{stage - 1, Kind::forward, microbatch}, {stage, Kind::receive_forward, microbatch}};
    case Kind::backward:
    case Kind::backward_input:
      return {{stage, Kind::forward, microbatch},
              {stage + 1, Kind::backward, microbatch},
              {stage + 1, Kind::backward_input, microbatch},
              {stage, Kind::receive_backward, microbatch}};
    case Kind::backward_weight:
      return {{stage, Kind::backward_input, microbatch}};
    case Kind::send_forward:
      return {{stage, Kind::forward, microbatch}};
    case Kind::send_backward:
      return {{stage, Kind::backward, microbatch}, {stage, Kind::backward_input, microbatch}};
    default:
      return {};
  }
}
}  // namespace

void Findings::add(std::string problem) {
  if (problems_.size() < kMost) {
    problems_.push_back(std::move(problem));
  } else if (!full()) {
    full_ = true;
    problems_.push_back("and more like these");
  }
}

void find_out_of_range(const Schedule& schedule, Findings& findings) {
  if (schedule.stages < 1 || schedule.microbatches < 1 || schedule.ranks.empty()) {
    findings.add("there is nothing to do (stages: " + std::to_string(schedule.stages) +
                 ", microbatches: " + std::to_string(schedule.microbatches) +
                 ", ranks: " + std::to_string(schedule.ranks.size()) + ")");
    return;
  }
  int64_t forwards = 0;
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    const auto& actions = schedule.ranks[rank];
    for (size_t i = 0; i < actions.size(); ++i) {
      const auto& action = actions[i];
      forwards += action.kind == Kind::forward ? 1 : 0;
      if (action.stage < 0 || action.stage >= schedule.stages || action.microbatch < 0 ||
          action.microbatch >= schedule.microbatches) {
        findings.add(to_string(action) + " (rank " + std::to_string(rank) + ", action " +
                     std::to_string(i) +
                     ") is out of range (stages: " + std::to_string(schedule.stages) +
                     ", microbatches: " + std::to_string(schedule.microbatches) + ")");
      }
    }
  }
  // So that nothing is laid out for microbatches which are not there at all.
  const auto due = int64_t{schedule.stages} * schedule.microbatches;
  if (due > 2 * forwards + 1000) {
    findings.add(std::to_string(schedule.stages) + " stages and " +
                 std::to_string(schedule.microbatches) + " microbatches take " +
                 std::to_string(due) + " forwards, of which " + std::to_string(forwards) +
                 " are there");
  }
}

void find_doubled(const Places& places, Findings& findings) {
  const auto ranks = first_rank_of_stages(places);
  std::vector<bool> named(ranks.size());
  for (int place = 0; place < places.size(); ++place) {
    const auto& action = places.action(place);
    const int first = places.find(action);
    if (first != place) {
      findings.add(places.full_text(place) + " is there already (rank " +
                   std::to_string(places.rank(first)) + ", " + places.number(first) + ")");
    }
    if (ranks[action.stage] != places.rank(place) && !named[action.stage]) {
      named[action.stage] = true;
      findings.add("stage " + std::to_string(action.stage) + " is on ranks " +
                   std::to_string(ranks[action.stage]) + " and " +
                   std::to_string(places.rank(place)));
    }
  }
}

void find_missing(const Places& places, Findings& findings) {
  const auto& schedule = places.schedule();
  const bool trains = has_backward(schedule);
  for (int stage = 0; stage < schedule.stages; ++stage) {
    for (int microbatch = 0; microbatch < schedule.microbatches && !findings.full(); ++microbatch) {
      const Action forward{stage, Kind::forward, microbatch};
      if (places.find(forward) < 0) {
        findings.add(to_string(forward) + " is missing");
      }
      auto problem = trains ? backward_problem(places, stage, microbatch) : "";
      if (!problem.empty()) {
        findings.add(std::move(problem));
      }
    }
  }
  if (!has_communication(schedule)) {
    return;
  }
  const auto ranks = first_rank_of_stages(places);
  for (int place = 0; place < places.size(); ++place) {
    if (!is_compute(places.action(place).kind)) {
      find_idle_message(places, place, ranks, trains, findings);
    } else if (places.action(place).kind != Kind::backward_weight) {
      find_missing_message(places, place, ranks, findings);
    }
  }
}

void find_misordered(const Places& places, Findings& findings) {
  for (int place = 0; place < places.size(); ++place) {
    for (const auto& needed : needed_before(places.action(place))) {
      const int other = places.find(needed);
      if (other >= 0 && places.is_before(place, other)) {
        findings.add(places.full_text(place) + " comes before " + places.text(other) + " (" +
                     places.number(other) + "), which it needs");
      }
    }
  }
}

}  // namespace brimful::pipeline
