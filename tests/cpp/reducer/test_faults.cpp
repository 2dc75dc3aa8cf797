// Every set of ranks fails at every point of a step, with a sizer and in a plain loop: no rank goes silent.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "support/catch.h"
#include "support/checks.h"
#include "support/trainer.h"
#include "support/watchdog.h"

#include <brimful/launch/run_ranks.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <sstream>

namespace test_faults {

using brimful::BatchSizerOptions;
using brimful::Outcome;
using brimful::run_ranks;
using namespace brimful::test;

namespace {

constexpr int kParameters = 8;
constexpr int kFirstOfFirstBucket =
    6;  // third.weight and third.bias leave together, before all others
constexpr int64_t kRows = 8;
constexpr int kFaultyStep = 1;
constexpr int kSteps = 3;
constexpr double kPromptly = 2;  // seconds

struct Case {
  unsigned failing = 0;  // a bit per rank
  Fault fault;

  bool fails(int rank) const { return (failing >> rank & 1U) != 0; }
  bool memory() const { return fault.kind == Fault::Kind::out_of_memory; }
  std::vector<int> failing_ranks(int world_size) const {
    std::vector<int> ranks;
    for (int rank = 0; rank < world_size; ++rank) {
      if (fails(rank)) {
        ranks.push_back(rank);
      }
    }
    return ranks;
  }
};

std::string name_of(const Case& item, int rank) {
  std::ostringstream name;
  name << "failing ranks: " << item.failing << " (bits), at: " << static_cast<int>(item.fault.at)
       << ", piece: " << item.fault.piece << ", parameter: " << item.fault.parameter
       << ", memory: " << item.memory() << ", seen on rank " << rank << ": ";
  return name.str();
}

std::vector<Case> all_cases(int world_size, int pieces) {
  std::vector<Case> cases;
  for (unsigned failing = 1; failing < 1U << world_size; ++failing) {
    for (const auto kind : {Fault::Kind::out_of_memory, Fault::Kind::error}) {
      for (int piece = 0; piece < pieces; ++piece) {
        const auto add = [&](Fault::At at, int parameter) {
          Case item{failing, {}};
          item.fault.at = at;
          item.fault.piece = piece;
          item.fault.parameter = parameter;
          item.fault.kind = kind;
          cases.push_back(item);
        };
        add(Fault::At::forward, 0);
        add(Fault::At::input, 0);
        for (int parameter = 0; parameter < kParameters; ++parameter) {
          add(Fault::At::gradient, parameter);
        }
      }
    }
  }
  return cases;
}

/// Buckets of one parameter; control records go between hosts, or in the last one.
brimful::ReducerOptions tiny_buckets_and(bool between_hosts) {
  auto options = tiny_buckets();
  options.between_hosts = between_hosts;
  return options;
}

void arm(Fault& fault, const Case& item, int rank) {
  fault = item.fault;
  fault.text = "planted on rank " + std::to_string(rank);
  fault.armed = item.fails(rank);
}

void expect_error(Checks& checks, const Case& item, int rank, int world_size, const Caught& caught,
                  bool sizer) {
  using Type = Caught::Type;
  const auto name = name_of(item, rank);
  const auto ended = name + "ended with '" + caught.text + "', ";
  checks.expect(caught.seconds < kPromptly, ended + "late");
  if (item.fails(rank)) {
    checks.expect(caught.type == (item.memory() ? Type::out_of_memory : Type::runtime_error),
                  ended + "not its own type");
    checks.expect(caught.text.rfind("planted on rank " + std::to_string(rank), 0) == 0,
                  ended + "not its own words");
    return;
  }
  const bool memory = item.memory() && !sizer;
  checks.expect(caught.type == (memory ? Type::rank_out_of_memory : Type::rank_failed),
                ended + "not RankFailed");
  const auto ranks = item.failing_ranks(world_size);
  checks.expect(caught.rank == ranks.front(), ended + "the wrong rank is named");
  for (const int failed : ranks) {
    checks.expect(
        caught.text.find("planted on rank " + std::to_string(failed)) != std::string::npos,
        ended + "rank " + std::to_string(failed) + "'s words are missing");
  }
}

// --- With a sizer ---------------------------------------------------------------------------------

struct Run {
  std::vector<Outcome> outcomes;  // of the steps that stand
  std::vector<at::Tensor> state;
};

BatchSizerOptions in_pieces(int64_t pieces) {
  BatchSizerOptions options;
  options.pieces = pieces;
  return options;
}

void expect_outcome(Checks& checks, const Case& item, int rank, int world_size,
                    const Outcome& outcome) {
  const auto name = name_of(item, rank);
  const bool last_piece = item.fault.piece == 1;
  if (last_piece && item.fault.at == Fault::At::input) {
    checks.expect(outcome.retries == 0 && outcome.pieces == 2,
                  name + "a complete step was repeated");
    return;
  }
  const bool alone = !last_piece || item.fault.at == Fault::At::forward ||
                     item.fault.parameter >= kFirstOfFirstBucket;
  if (alone && !item.fails(rank)) {
    checks.expect(outcome.retries == 0, name + "repeated though no bucket had left");
    return;
  }
  checks.expect(outcome.retries == 1 && outcome.attempts.size() == 2, name + "not repeated once");
  checks.expect(outcome.pieces == (item.fails(rank) ? 4 : 2), name + "wrong split");
  const auto& first = outcome.attempts.front();
  checks.expect(first.alone == alone, name + "alone is " + std::to_string(first.alone));
  checks.expect(!item.fails(rank) || (first.buckets_launched == 0) == alone,
                name + "buckets launched: " + std::to_string(first.buckets_launched));
  checks.expect(first.ran_out == (alone ? std::vector<int>{rank} : item.failing_ranks(world_size)),
                name + "the wrong ranks ran out");
}

Run run_with_fault(Checks& checks, const Group& group, const Case& item, bool between_hosts) {
  const int rank = group->getRank();
  Trainer trainer(group, std::make_shared<Net>(), in_pieces(2), tiny_buckets_and(between_hosts));
  Run run;
  for (int step = 0; step < kSteps; ++step) {
    if (step != kFaultyStep) {
      run.outcomes.push_back(trainer.step(batch_of(rank, step, kRows)));
      continue;
    }
    const auto before = trainer.state();
    arm(*trainer.model->fault, item, rank);
    const auto caught =
        catching([&] { run.outcomes.push_back(trainer.step(batch_of(rank, step, kRows))); });
    if (item.memory()) {
      checks.expect(caught.type == Caught::Type::nothing,
                    name_of(item, rank) + "raised: " + caught.text);
      if (caught.type == Caught::Type::nothing) {
        expect_outcome(checks, item, rank, group->getSize(), run.outcomes.back());
      }
    } else {
      expect_error(checks, item, rank, group->getSize(), caught, true);
      checks.expect(same_bits(before, trainer.state()),
                    name_of(item, rank) + "the failed step left a trace");
    }
  }
  run.state = trainer.state();
  return run;
}

/// The steps and splits of all ranks: runs that share them must end alike.
using Recipe = std::vector<std::vector<std::pair<int, std::vector<int64_t>>>>;

Recipe recipe_of(const Case& item, const std::vector<std::vector<Run>>& runs, size_t index) {
  Recipe recipe;
  for (const auto& of_rank : runs) {
    auto& steps = recipe.emplace_back();
    const auto& outcomes = of_rank.at(index).outcomes;
    for (size_t i = 0; i < outcomes.size(); ++i) {
      const bool left_out = !item.memory() && i >= kFaultyStep;
      steps.emplace_back(static_cast<int>(i) + (left_out ? 1 : 0), outcomes[i].split);
    }
  }
  return recipe;
}

Run replay(const Group& group, const Recipe& recipe) {
  Trainer trainer(group, std::make_shared<Net>(), in_pieces(2));
  Run run;
  for (const auto& [step, split] : recipe.at(group->getRank())) {
    run.outcomes.push_back(trainer.step(batch_of(group->getRank(), step, kRows), split));
  }
  run.state = trainer.state();
  return run;
}

void expect_replays(Checks& checks, const std::vector<Case>& cases,
                    const std::vector<std::vector<Run>>& runs) {
  std::map<Recipe, std::vector<size_t>> sharing;
  for (size_t i = 0; i < cases.size(); ++i) {
    sharing[recipe_of(cases[i], runs, i)].push_back(i);
  }
  run_ranks({static_cast<int>(runs.size())}, [&](int rank, const Group& group) {
    for (const auto& [recipe, indices] : sharing) {
      const auto again = replay(group, recipe);
      for (const auto i : indices) {
        const auto& run = runs[rank][i];
        const auto name = name_of(cases[i], rank);
        checks.expect(same_bits(run.state, again.state), name + "a replay of the splits differs");
        for (size_t j = 0; j < run.outcomes.size(); ++j) {
          checks.expect(run.outcomes[j].loss == again.outcomes[j].loss, name + "the loss differs");
        }
      }
    }
  });
}

// --- In a plain loop ------------------------------------------------------------------------------

std::vector<at::Tensor> run_plain(Checks& checks, const Group& group, const Case& item, bool scoped,
                                  bool between_hosts) {
  const int rank = group->getRank();
  brimful::DistributedDataParallel<Net> model(std::make_shared<Net>(), group,
                                              tiny_buckets_and(between_hosts));
  const auto step = [&](int number) {
    const auto batch = batch_of(rank, number, kRows);
    const auto work = [&] {
      at::mse_loss(model(watched_input(batch.data, model->fault)), batch.target).backward();
    };
    if (scoped) {
      model.step(work);
    } else {
      work();
    }
    model->update();
  };
  step(0);
  const auto before = copies(model->parameters());
  arm(*model->fault, item, rank);
  const auto caught = catching([&] { step(kFaultyStep); });
  model->update(0);  // as zero_grad
  checks.expect(same_bits(before, copies(model->parameters())),
                name_of(item, rank) + "parameters changed");
  const auto after = catching([&] { step(2); });
  checks.expect(after.type == Caught::Type::nothing,
                name_of(item, rank) + "next step raised: " + after.text);
  if (scoped) {
    expect_error(checks, item, rank, group->getSize(), caught, false);
  } else if (!item.fails(rank)) {
    checks.expect(caught.type == Caught::Type::rank_failed && caught.seconds < kPromptly,
                  name_of(item, rank) + "without a scope ended with '" + caught.text + "'");
  }
  auto state = copies(model->parameters());
  const auto buffers = copies(model->buffers());
  state.insert(state.end(), buffers.begin(), buffers.end());
  return state;
}

void expect_equal_replicas(Checks& checks, const std::vector<Case>& cases,
                           const std::vector<std::vector<std::vector<at::Tensor>>>& states) {
  for (size_t rank = 1; rank < states.size(); ++rank) {
    for (size_t i = 0; i < cases.size(); ++i) {
      checks.expect(same_bits(states[0].at(i), states[rank].at(i)),
                    name_of(cases[i], static_cast<int>(rank)) + "the replicas differ");
    }
  }
}

}  // namespace

TEST_CASE("With a sizer no failure anywhere in a step silences a rank",
          "[reducer][sizer][faults]") {
  brimful::memory::install();
  brimful::set_log_level(brimful::LogLevel::error);
  const auto [world_size, between_hosts] =
      GENERATE(table<int, bool>({{2, false}, {3, false}, {3, true}}));
  const auto kind = GENERATE(Fault::Kind::out_of_memory, Fault::Kind::error);
  auto cases = all_cases(world_size, 2);
  std::erase_if(cases, [&](const auto& item) { return item.fault.kind != kind; });
  Checks checks;
  std::vector<std::vector<Run>> runs(world_size);
  std::vector<std::vector<std::vector<at::Tensor>>> states(world_size);
  const Watchdog watchdog("the fault matrix with a sizer", std::chrono::seconds(40));
  run_ranks({world_size}, [&, over_hosts = between_hosts](int rank, const Group& group) {
    for (const auto& item : cases) {
      runs[rank].push_back(run_with_fault(checks, group, item, over_hosts));
      states[rank].push_back(runs[rank].back().state);
    }
  });
  expect_replays(checks, cases, runs);
  expect_equal_replicas(checks, cases, states);
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Two models in another order on any rank, in any step, fail on all ranks",
          "[reducer][faults]") {
  const int world_size = GENERATE(2, 3);
  const int outputs = GENERATE(1, 9);  // of the second model: of the same sizes, or of others
  const Watchdog watchdog("the order of models");
  Checks checks;
  run_ranks({world_size}, [&](int rank, const Group& group) {
    using Model = brimful::DistributedDataParallel<Net>;
    std::vector<std::unique_ptr<Model>> models;
    for (const int width : {1, outputs}) {
      models.push_back(std::make_unique<Model>(
          std::make_shared<Net>(false, at::kDouble, 0.1 * width, width), group, tiny_buckets()));
    }
    const auto loss_of = [&](Model& model, int step) {
      return model(batch_of(rank, step, kRows, at::kDouble).data).pow(2).mean();
    };
    for (const bool together : {false, true}) {
      for (unsigned odd = 1; odd + 1 < 1U << world_size; ++odd) {
        for (int faulty = 0; faulty < kSteps; ++faulty) {
          for (int step = 0; step < kSteps; ++step) {
            const bool swapped = step == faulty && (odd >> rank & 1U) != 0;
            auto& first = *models[swapped ? 1 : 0];
            auto& second = *models[swapped ? 0 : 1];
            std::vector<std::function<void()>> backwards;
            if (together) {
              backwards = {[&] { (loss_of(first, step) + loss_of(second, step)).backward(); }};
            } else {
              backwards = {[&] { loss_of(first, step).backward(); },
                           [&] { loss_of(second, step).backward(); }};
            }
            for (const auto& backward : backwards) {
              const auto caught = catching(backward);
              const bool refused =
                  caught.type == Caught::Type::value_error &&
                  caught.text.find("model 1 with parameter first.weight") != std::string::npos &&
                  caught.text.find("model 2 with parameter first.weight") != std::string::npos;
              checks.expect(step == faulty ? refused : caught.type == Caught::Type::nothing,
                            "step " + std::to_string(step) + " ended with '" + caught.text + "'");
            }
            for (const auto& model : models) {
              const auto gradients = (*model)->gradients();
              checks.expect(
                  std::all_of(gradients.begin(), gradients.end(),
                              [&](const auto& g) { return g.defined() != (step == faulty); }),
                  "gradients that are there");
              (*model)->update();
            }
          }
        }
      }
    }
    std::vector<at::Tensor> sums;
    for (const auto& model : models) {
      for (const auto& parameter : (*model)->parameters()) {
        sums.push_back(parameter.detach().reshape({-1}));
      }
    }
    const auto own = at::cat(sums);
    std::vector<at::Tensor> all{own.clone()};
    group->allreduce(all)->wait();
    checks.expect(at::allclose(all[0], own * world_size, 1e-12), "the replicas differ");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("In a plain loop no failure anywhere in a step silences a rank", "[reducer][faults]") {
  brimful::memory::install();
  const auto [world_size, between_hosts] =
      GENERATE(table<int, bool>({{2, false}, {3, false}, {3, true}}));
  const auto cases = all_cases(world_size, 1);
  Checks checks;
  std::vector<std::vector<std::vector<at::Tensor>>> states(world_size);
  const Watchdog watchdog("the fault matrix in a plain loop", std::chrono::seconds(40));
  run_ranks({world_size}, [&, over_hosts = between_hosts](int rank, const Group& group) {
    for (const auto& item : cases) {
      states[rank].push_back(run_plain(checks, group, item, true, over_hosts));
    }
  });
  expect_equal_replicas(checks, cases, states);
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A plain loop without a scope announces its failure too", "[reducer][faults]") {
  brimful::memory::install();
  const auto [world_size, between_hosts] =
      GENERATE(table<int, bool>({{2, false}, {3, false}, {2, true}}));
  auto cases = all_cases(world_size, 1);
  std::erase_if(cases,
                [](const auto& item) { return item.memory(); });  // the kind is not known here
  Checks checks;
  std::vector<std::vector<std::vector<at::Tensor>>> states(world_size);
  const Watchdog watchdog("the fault matrix without a scope");
  run_ranks({world_size}, [&, over_hosts = between_hosts](int rank, const Group& group) {
    for (const auto& item : cases) {
      states[rank].push_back(run_plain(checks, group, item, false, over_hosts));
    }
  });
  expect_equal_replicas(checks, cases, states);
  CHECK(checks.failures() == std::vector<std::string>{});
}

}  // namespace test_faults
