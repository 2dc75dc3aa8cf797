#pragma once
// Schedules with small mistakes, the same in every run.
#include <brimful/pipeline/schedules.h>

#include <algorithm>
#include <random>
#include <vector>

namespace brimful::test {
using pipeline::Action;
using pipeline::ActionKind;
using pipeline::make_schedule;
using pipeline::ReceivePlace;
using pipeline::Schedule;
using pipeline::schedule_names;

/// Random numbers that are the same everywhere.
class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  int below(int end) { return static_cast<int>(engine_() % static_cast<uint32_t>(end)); }

 private:
  std::mt19937 engine_;
};

/// Whether there is a built-in one of this name for so many stages a rank.
inline bool is_defined(const std::string& name, int stages_per_rank) {
  if (name == "zbv" || name == "dualpipev") {
    return stages_per_rank == 2;
  }
  return stages_per_rank == 1 || (name != "gpipe" && name != "1f1b" && name != "zb_h2");
}

/// A built-in one for at most so many ranks and microbatches, with or without communication.
inline Schedule random_schedule(Random& random, int ranks, int microbatches) {
  const auto names = schedule_names();
  const auto& name = names[random.below(static_cast<int>(names.size()))];
  const bool both = is_defined(name, 1) && is_defined(name, 2);
  const int stages_per_rank = both ? 1 + random.below(2) : is_defined(name, 1) ? 1 : 2;
  auto schedule =
      make_schedule(name, 1 + random.below(ranks), stages_per_rank, 1 + random.below(microbatches));
  switch (random.below(3)) {
    case 0:
      return schedule;
    case 1:
      return with_communication(schedule, ReceivePlace::before_use);
    default:
      return with_communication(schedule, ReceivePlace::when_sent);
  }
}

/// A random receive or other action goes elsewhere in its rank.
inline void move_one(std::vector<Action>& actions, bool receive, Random& random) {
  const int count = static_cast<int>(actions.size());
  int i = random.below(count);
  for (int tries = 0; tries < 20 && receive && is_compute(actions[i].kind); ++tries) {
    i = random.below(count);
  }
  const auto action = actions[i];
  actions.erase(actions.begin() + i);
  actions.insert(actions.begin() + std::clamp(i - 4 + random.below(9), 0, count - 1), action);
}

/// One small change; when `keeps_all`, only of the order.
inline void mutate(Schedule& schedule, bool keeps_all, Random& random) {
  auto& actions = schedule.ranks[random.below(static_cast<int>(schedule.ranks.size()))];
  auto& others = schedule.ranks[random.below(static_cast<int>(schedule.ranks.size()))];
  if (actions.empty()) {
    return;
  }
  const int count = static_cast<int>(actions.size());
  const int i = random.below(count);
  const int j = random.below(count);
  const int kind = keeps_all ? 14 : random.below(24);
  if (kind < 8) {  // neighbours change places
    std::swap(actions[i], actions[(i + 1) % count]);
  } else if (kind < 12) {
    std::swap(actions[i], actions[j]);
  } else if (kind < 14) {
    std::reverse(actions.begin() + std::min(i, j), actions.begin() + std::max(i, j) + 1);
  } else if (kind < 16) {
    move_one(actions, random.below(4) > 0, random);
  } else if (kind == 16) {
    actions.erase(actions.begin() + i);
  } else if (kind == 17) {
    actions.insert(actions.begin() + j, Action(actions[i]));
  } else if (kind == 18) {
    others.push_back(actions[i]);
    actions.erase(actions.begin() + i);
  } else if (kind == 19) {
    actions[i].kind = static_cast<ActionKind>(random.below(8));
  } else if (kind == 20) {
    actions[i].stage += random.below(2) == 0 ? 1 : -1;
  } else if (kind == 21) {
    actions[i].microbatch += random.below(2) == 0 ? 1 : -1;
  } else if (kind == 22) {
    schedule.stages += random.below(2) == 0 ? 1 : -1;
  } else {
    schedule.microbatches += random.below(2) == 0 ? 1 : -1;
  }
}

}  // namespace brimful::test
