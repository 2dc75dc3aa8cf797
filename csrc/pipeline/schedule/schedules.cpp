#include <brimful/pipeline/schedules.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cctype>

#include "pipeline/schedule/v_schedules.h"

namespace brimful::pipeline {
namespace {
using Kind = ActionKind;
constexpr int64_t kMostForwards = int64_t{1} << 24;

/// How a rank's forwards and backwards take turns.
struct TurnsOfRank {
  int warm_up;             ///< forwards before the first pair of a forward and a backward
  bool splits = false;     ///< backwards are I and W
  int weights_behind = 0;  ///< the W of a microbatch follows the I of the one that is so many later
};

/// A forward and a backward in turn after a warm-up, until each list is at its end.
std::vector<Action> in_turns(const std::vector<Action>& forwards, std::vector<Action> backwards,
                             const TurnsOfRank& turns) {
  std::vector<Action> actions;
  const auto count = forwards.size();
  const auto warm_up = std::min<size_t>(turns.warm_up, count);
  actions.assign(forwards.begin(), forwards.begin() + static_cast<int64_t>(warm_up));
  size_t weights = 0;
  const auto add_weight = [&] {
    actions.push_back(
        {backwards[weights].stage, Kind::backward_weight, backwards[weights].microbatch});
    ++weights;
  };
  for (size_t i = 0; i < count; ++i) {
    if (warm_up + i < count) {
      actions.push_back(forwards[warm_up + i]);
    }
    backwards[i].kind = turns.splits ? Kind::backward_input : Kind::backward;
    actions.push_back(backwards[i]);
    if (turns.splits && i >= static_cast<size_t>(turns.weights_behind)) {
      add_weight();
    }
  }
  while (turns.splits && weights < count) {
    add_weight();
  }
  return actions;
}

/// Rounds of at least `ranks` microbatches (all, if there are fewer), as equal as may be, the larger ones first.
std::vector<int> rounds_of(int ranks, int microbatches) {
  const int count = std::max(1, microbatches / ranks);
  std::vector<int> rounds(count, microbatches / count);
  for (int i = 0; i < microbatches % count; ++i) {
    ++rounds[i];
  }
  return rounds;
}

/// A rank's forwards, or its backwards: in each round all microbatches through one of its stages after the other.
std::vector<Action> in_rounds(const std::vector<int>& rounds, std::vector<int> stages, Kind kind) {
  if (kind != Kind::forward) {
    std::reverse(stages.begin(), stages.end());
  }
  std::vector<Action> actions;
  int first = 0;
  for (const int round : rounds) {
    for (const int stage : stages) {
      for (int i = 0; i < round; ++i) {
        actions.push_back({stage, kind, first + i});
      }
    }
    first += round;
  }
  return actions;
}

std::vector<int> stages_of(int rank, int ranks, int stages_per_rank) {
  std::vector<int> stages;
  stages.reserve(stages_per_rank);
  for (int i = 0; i < stages_per_rank; ++i) {
    stages.push_back(rank + i * ranks);
  }
  return stages;
}

void check_numbers(int ranks, int stages_per_rank, int microbatches) {
  TORCH_CHECK_VALUE(ranks >= 1 && stages_per_rank >= 1 && microbatches >= 1,
                    "a schedule needs one of each at least (ranks: ", ranks,
                    ", stages_per_rank: ", stages_per_rank, ", microbatches: ", microbatches, ")");
  const auto rows = int64_t{ranks} * stages_per_rank;
  TORCH_CHECK_VALUE(rows <= kMostForwards && rows * microbatches <= kMostForwards,
                    "a schedule has at most ", kMostForwards, " forwards (ranks: ", ranks,
                    ", stages_per_rank: ", stages_per_rank, ", microbatches: ", microbatches,
                    "); take fewer microbatches");
}

template <typename Rank>
Schedule make(const char* name, int ranks, int stages_per_rank, int microbatches,
              const Rank& actions_of) {
  check_numbers(ranks, stages_per_rank, microbatches);
  Schedule schedule{name, ranks * stages_per_rank, microbatches, {}};
  for (int rank = 0; rank < ranks; ++rank) {
    schedule.ranks.push_back(actions_of(rank));
  }
  return schedule;
}

/// A schedule of turns in rounds; `turns_of` gets a rank, and the number of forwards before its last stage's first one.
template <typename TurnsOf>
Schedule make_turns(const char* name, int ranks, int stages_per_rank, int microbatches,
                    const TurnsOf& turns_of) {
  return make(name, ranks, stages_per_rank, microbatches, [&](int rank) {
    const auto rounds = rounds_of(ranks, microbatches);
    const auto stages = stages_of(rank, ranks, stages_per_rank);
    return in_turns(in_rounds(rounds, stages, Kind::forward),
                    in_rounds(rounds, stages, Kind::backward),
                    turns_of(rank, (stages_per_rank - 1) * rounds[0]));
  });
}

struct BuiltIn {
  std::string_view name;
  int stages_per_rank;  ///< 0: any
  Schedule (*make)(int ranks, int stages_per_rank, int microbatches);
};
constexpr auto kBuiltIns = std::to_array<BuiltIn>({
    {"gpipe", 1, [](int p, int, int m) { return gpipe(p, m); }},
    {"1f1b", 1, [](int p, int, int m) { return one_forward_one_backward(p, m); }},
    {"interleaved_1f1b", 0, &interleaved_1f1b},
    {"looped_bfs", 0, &looped_bfs},
    {"zb_h1", 0, &zb_h1},
    {"zb_h2", 1, [](int p, int, int m) { return zb_h2(p, m); }},
    {"zbv", 2, [](int p, int, int m) { return zbv(p, m); }},
    {"dualpipev", 2, [](int p, int, int m) { return dualpipev(p, m); }},
    {"forward_only", 0, &forward_only},
});

/// Without capitals, underscores, and the "Schedule" of torch's classes.
std::string plain_name(std::string_view name) {
  std::string plain;
  for (const char letter : name) {
    if (letter != '_') {
      plain += static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
    }
  }
  constexpr std::string_view kClass = "schedule";
  return plain.starts_with(kClass) ? plain.substr(kClass.size()) : plain;
}

/// Whether a built-in one is meant, by its name here or in torch.distributed.pipelining.
bool is_called(const BuiltIn& built_in, std::string_view name) {
  const auto plain = plain_name(name);
  return plain == plain_name(built_in.name) ||
         (built_in.name == "zb_h1" && plain == "interleavedzerobubble") ||
         (built_in.name == "zbv" && plain == "zbvzerobubble");
}

template <typename Condition>
std::string names_where(const Condition& holds) {
  std::string names;
  for (const auto& built_in : kBuiltIns) {
    if (holds(built_in)) {
      names += (names.empty() ? "" : ", ") + std::string(built_in.name);
    }
  }
  return names;
}
}  // namespace

Schedule gpipe(int ranks, int microbatches) {
  return make("gpipe", ranks, 1, microbatches, [&](int rank) {
    auto actions = in_rounds({microbatches}, {rank}, Kind::forward);
    const auto backwards = in_rounds({microbatches}, {rank}, Kind::backward);
    actions.insert(actions.end(), backwards.begin(), backwards.end());
    return actions;
  });
}

Schedule one_forward_one_backward(int ranks, int microbatches) {
  return make_turns("1f1b", ranks, 1, microbatches,
                    [&](int rank, int) { return TurnsOfRank{ranks - 1 - rank}; });
}

Schedule interleaved_1f1b(int ranks, int stages_per_rank, int microbatches) {
  return make_turns(
      "interleaved_1f1b", ranks, stages_per_rank, microbatches,
      [&](int rank, int waited_for) { return TurnsOfRank{waited_for + 2 * (ranks - 1 - rank)}; });
}

Schedule looped_bfs(int ranks, int stages_per_rank, int microbatches) {
  return make("looped_bfs", ranks, stages_per_rank, microbatches, [&](int rank) {
    auto actions =
        in_rounds({microbatches}, stages_of(rank, ranks, stages_per_rank), Kind::forward);
    for (auto forward = actions.size(); forward-- > 0;) {
      actions.push_back({actions[forward].stage, Kind::backward, actions[forward].microbatch});
    }
    return actions;
  });
}

Schedule zb_h1(int ranks, int stages_per_rank, int microbatches) {
  return make_turns("zb_h1", ranks, stages_per_rank, microbatches, [&](int rank, int waited_for) {
    return TurnsOfRank{waited_for + ranks - 1 - rank, true, rank};
  });
}

Schedule zb_h2(int ranks, int microbatches) {
  return make_turns("zb_h2", ranks, 1, microbatches, [&](int rank, int) {
    return TurnsOfRank{2 * (ranks - 1 - rank), true, 2 * rank};
  });
}

Schedule zbv(int ranks, int microbatches) {
  return make("zbv", ranks, 2, microbatches,
              [&](int rank) { return zbv_rank(rank, ranks, microbatches); });
}

Schedule dualpipev(int ranks, int microbatches) {
  return make("dualpipev", ranks, 2, microbatches,
              [&](int rank) { return dualpipev_rank(rank, ranks, microbatches); });
}

Schedule forward_only(int ranks, int stages_per_rank, int microbatches) {
  return make("forward_only", ranks, stages_per_rank, microbatches, [&](int rank) {
    return in_rounds(rounds_of(ranks, microbatches), stages_of(rank, ranks, stages_per_rank),
                     Kind::forward);
  });
}

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  names.reserve(kBuiltIns.size());
  for (const auto& built_in : kBuiltIns) {
    names.emplace_back(built_in.name);
  }
  return names;
}

Schedule make_schedule(std::string_view name, int ranks, int stages_per_rank, int microbatches) {
  for (const auto& built_in : kBuiltIns) {
    if (is_called(built_in, name)) {
      TORCH_CHECK_VALUE(
          built_in.stages_per_rank == 0 || built_in.stages_per_rank == stages_per_rank,
          "this schedule is defined for ", built_in.stages_per_rank,
          built_in.stages_per_rank == 1 ? " stage" : " stages", " a rank only (schedule: ", name,
          ", stages_per_rank: ", stages_per_rank,
          "); these take any number: ", names_where([](const BuiltIn& other) {
            return other.stages_per_rank == 0 && other.make != &forward_only;
          }));
      return built_in.make(ranks, stages_per_rank, microbatches);
    }
  }
  TORCH_CHECK_VALUE(false, "there is no schedule of this name (name: '", name, "'); take one of ",
                    names_where([](const BuiltIn&) { return true; }),
                    ", or Schedule::from_csv your own");
}

}  // namespace brimful::pipeline
