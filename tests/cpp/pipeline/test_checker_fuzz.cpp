#include "support/catch.h"

#include <brimful/pipeline/checker.h>
#include <brimful/pipeline/schedule_text.h>
#include <brimful/pipeline/schedules.h>
#include <c10/util/Exception.h>

#include <random>

#include "pipeline/reference_executor.h"

using namespace brimful::pipeline;
using brimful::test::Ending;
using brimful::test::ReferenceExecutor;

namespace {
/// Random numbers that are the same everywhere.
class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  int below(int end) { return static_cast<int>(engine_() % static_cast<uint32_t>(end)); }

 private:
  std::mt19937 engine_;
};

Schedule random_schedule(Random& random) {
  const auto names = schedule_names();
  const auto& name = names[random.below(static_cast<int>(names.size()))];
  const bool any = name == "interleaved_1f1b" || name == "looped_bfs" || name == "zb_h1";
  const int stages_per_rank = name == "zbv" || name == "dualpipev" ? 2
                              : any                                ? 1 + random.below(2)
                                                                   : 1;
  auto schedule = make_schedule(name, 1 + random.below(4), stages_per_rank, 1 + random.below(5));
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
void move_one(std::vector<Action>& actions, bool receive, Random& random) {
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
void mutate(Schedule& schedule, bool keeps_all, Random& random) {
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

Ending ending_of(const Schedule& schedule, const CheckOptions& options) {
  const auto ending = ReferenceExecutor(schedule, options).run();
  const bool completes = ending == Ending::complete && options.channel_capacity;
  if (!completes || has_communication(schedule) || schedule.stages < 1 ||
      schedule.microbatches < 1) {
    return ending;
  }
  return ReferenceExecutor(with_communication(schedule), options).run();
}

std::string describe(const Schedule& schedule, const CheckOptions& options) {
  return schedule.name + ", capacity " +
         (options.channel_capacity ? std::to_string(*options.channel_capacity) : "any") +
         (options.channels == ChannelKind::by_rank ? " by rank, " : " by stage, ") +
         std::to_string(schedule.stages) + " stages, " + std::to_string(schedule.microbatches) +
         " microbatches:\n" + to_csv(schedule);
}
}  // namespace

TEST_CASE("The checker's verdict on mutated schedules is what an executor does", "[pipeline]") {
  Random random(2401);
  int fine = 0;
  int stuck = 0;
  int failed = 0;
  for (int round = 0; round < 10'000; ++round) {
    auto schedule = random_schedule(random);
    const bool keeps_all = random.below(4) > 0;
    for (int times = random.below(4); times > 0; --times) {
      mutate(schedule, keeps_all, random);
    }
    CheckOptions options;
    if (const int capacity = random.below(5); capacity < 4) {
      options.channel_capacity = capacity;
    }
    options.channels = random.below(2) == 0 ? ChannelKind::by_rank : ChannelKind::by_stage;
    const auto result = check(schedule, options);
    const bool has_work = schedule.stages > 0 &&
                          schedule.microbatches > 0;  // else it ends at once, with nothing done
    const auto ending = has_work ? ending_of(schedule, options) : Ending::failed;
    const bool agrees = result.ok()               ? ending == Ending::complete
                        : result.problems.empty() ? ending == Ending::stuck
                                                  : ending != Ending::complete;
    if (!agrees) {
      FAIL("the checker says '" << result.to_text() << "', the executor ends with "
                                << static_cast<int>(ending) << "\n"
                                << describe(schedule, options));
    }
    ++(result.ok() ? fine : result.problems.empty() ? stuck : failed);
  }
  INFO(fine << " valid, " << stuck << " deadlocks, " << failed << " others");
  CHECK(fine > 2000);
  CHECK(stuck > 500);
  CHECK(failed > 2000);
}
