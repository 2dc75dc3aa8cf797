// Data parallel and pipeline at once: two replicas of two ranks, each a thread here with nothing but gloo groups in common:
// one of its pipeline, one of its stages' replicas.
#include <ATen/ATen.h>
#include <brimful/error.h>
#include <brimful/launch/run_ranks.h>
#include <brimful/pipeline/peers.h>
#include <brimful/pipeline/pipeline.h>
#include <brimful/pipeline/schedule_text.h>
#include <brimful/reducer/reducer.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "launch/gloo_group.h"
#include "support/catch.h"
#include "support/checks.h"
#include "support/quiet_log.h"
#include "support/stages.h"
#include "support/watchdog.h"

#include <array>
#include <chrono>

namespace test_pipeline_replicas {

using namespace brimful;
using namespace brimful::test;
using pipeline::Action;
using pipeline::ActionKind;
using pipeline::Pipeline;
using pipeline::PipelineOptions;

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Store = c10::intrusive_ptr<c10d::Store>;
constexpr int kRanks = 2;
constexpr int kReplicas = 2;
constexpr int kMicrobatches = 4;
constexpr std::array<int64_t, kReplicas> kRows{11, 7};

struct Stores {
  std::array<Store, kReplicas> pipelines;
  std::array<Store, kRanks> stages;
  Stores() {
    for (auto& store : pipelines) {
      store = c10::make_intrusive<c10d::HashStore>();
    }
    for (auto& store : stages) {
      store = c10::make_intrusive<c10d::HashStore>();
    }
  }
};

Group join(const Store& store, int rank, int size) {
  return launch::make_gloo_group(store, rank, size, launch::GlooDevice::loopback,
                                 std::chrono::seconds(20));
}

struct Case {
  std::string schedule;
  int per_rank = 1;
  int microbatches = kMicrobatches;
};

/// A rank's place among the four, and its groups.
struct Seat {
  Seat(int number, Stores& stores)
      : rank(number % kRanks),
        replica(number / kRanks),
        pipeline_group(join(stores.pipelines[replica], rank, kRanks)),
        stage_group(join(stores.stages[rank], replica, kReplicas)) {}

  int rank;
  int replica;
  Group pipeline_group;
  Group stage_group;
};

PieceLoss weighted_mse(const at::Tensor& output, const at::Tensor& target) {
  const auto weights = target.select(1, 0).abs();
  const auto sum = weights.sum();
  return {((output - target).square().mean(1) * weights).sum() / sum, sum.item<double>()};
}

/// One of the four: its own stages, their reducers, and what the whole model makes of the rows of both replicas.
struct Rank {
  Rank(int number, Stores& stores, const Case& wanted, bool reduces = true, bool ties = false)
      : Rank(Seat(number, stores), wanted, reduces, ties) {}
  /// `ties`: the weights of the first and the last layer are one, of which both ranks have a copy.
  explicit Rank(const Seat& seat, const Case& wanted, bool reduces = true, bool ties = false)
      : stage_rank(seat.rank),
        replica(seat.replica),
        pipeline_group(seat.pipeline_group),
        stage_group(seat.stage_group),
        model(kRanks * wanted.per_rank),
        ties(ties) {
    if (ties) {
      const at::NoGradGuard no_grad;
      model.layers.back().weight.copy_(model.layers.front().weight);
    }
    const bool folded = wanted.schedule == "zbv";
    const int count = kRanks * wanted.per_rank;
    std::vector<pipeline::Stage> own;
    PipelineOptions options;
    for (int i = 0; i < count; ++i) {
      if ((folded ? std::min(i, count - 1 - i) : i % kRanks) != stage_rank) {
        continue;
      }
      own.push_back(pipeline::make_stage(model.layers[i], model.layers[i].parameters()));
      own_stages.push_back(i);
      ReducerOptions buckets;
      buckets.first_bucket_cap_mb = buckets.bucket_cap_mb.emplace(1e-5);  // one a parameter
      buckets.plan = "registration";
      if (reduces) {
        reducers.push_back(Reducer::create(model.layers[i].parameters(), {}, stage_group, buckets));
        options.reducers.push_back(reducers.back());
      }
    }
    if (ties) {
      const auto& layer = stage_rank == 0 ? model.layers.front() : model.layers.back();
      options.tied = {{"weight", layer.weight}};
    }
    options.peers = pipeline::peers_of(pipeline_group);
    options.schedule = wanted.schedule;
    options.microbatches = wanted.microbatches;
    options.before_action = [this](int, int index, const Action& action) {
      for (size_t i = 0; i < reducers.size(); ++i) {
        left.push_back({action, own_stages[i], reducers[i]->launched(), reducers[i]->buckets()});
      }
      if (index == fail_at && fail_left-- > 0) {
        fail();
      }
    };
    pipe = std::make_unique<Pipeline>(std::move(own), std::move(options));
  }

  void fail() const {
    TORCH_CHECK_WITH(OutOfMemoryError, !out_of_memory, "planted");
    throw std::runtime_error("planted");
  }
  at::Tensor rows_of(const at::Tensor& all) const {
    return all.narrow(0, replica == 0 ? 0 : kRows[0], kRows[replica]);
  }
  auto step() { return pipe->step(rows_of(x), rows_of(y), mse); }

  template <typename Loss>
  void expect_of(const Loss& loss_of_all) {
    model.zero_grad();
    const auto loss = loss_of_all(model(x), y);
    loss.backward();
    whole = loss.template item<double>();
    expected = copies(model.gradients());
    if (ties) {
      auto& last = expected[expected.size() - 2];
      expected[0] = last = expected[0] + last;
    }
    model.zero_grad();
  }
  bool as_expected(double factor = 1) const {
    return all_close_in(own_stages, model.gradients(), expected, factor);
  }

  struct Left {
    Action before;
    int stage;
    int64_t launched;
    int64_t buckets;
  };

  int stage_rank;
  int replica;
  Group pipeline_group;
  Group stage_group;
  Layers model;
  bool ties;
  std::vector<int> own_stages;
  at::Tensor x = filled({kRows[0] + kRows[1], 4}, 3, at::kDouble);
  at::Tensor y = filled({kRows[0] + kRows[1], 4}, 4, at::kDouble);
  double whole = 0;
  std::vector<at::Tensor> expected;
  std::vector<std::shared_ptr<Reducer>> reducers;
  std::vector<Left> left;
  int fail_at = -1;
  int fail_left = 0;
  bool out_of_memory = false;
  std::unique_ptr<Pipeline> pipe;
};

/// Runs `test` on all four ranks.
void run_grid(const std::function<void(int number, Stores& stores)>& test) {
  Stores stores;
  run_ranks({kRanks * kReplicas}, [&](int number, const Group&) { test(number, stores); });
}

std::string describe(int rank, int replica) {
  return "rank " + std::to_string(rank) + " of replica " + std::to_string(replica);
}
}  // namespace

TEST_CASE("Replicas of a pipeline give the mean over the rows of all", "[pipeline][replicas]") {
  const Watchdog watchdog("replicas", std::chrono::seconds(60));
  const auto wanted = GENERATE(
      values<Case>({{"1f1b", 1}, {"zb_h1", 1}, {"gpipe", 1}, {"interleaved_1f1b", 2}, {"zbv", 2}}));
  CAPTURE(wanted.schedule);
  Checks checks;
  run_grid([&](int number, Stores& stores) {
    Rank own(number, stores, wanted);
    own.expect_of(mse);
    for (int step = 1; step <= 3; ++step) {
      const auto outcome = own.step();
      const auto name = describe(own.stage_rank, own.replica) + ", step " + std::to_string(step);
      checks.expect(own.as_expected(step), "gradients of " + name);
      checks.expect(std::abs(outcome.loss - own.whole) < 1e-12, "loss of " + name);
      checks.expect(outcome.weight == kRows[0] + kRows[1], "weight of " + name);
    }
    own.expect_of(
        [](const auto& output, const auto& target) { return weighted_mse(output, target).loss; });
    for (int step = 1; step <= 2; ++step) {  // the first is scaled by the weight of the one before
      own.model.zero_grad();
      const auto outcome = own.pipe->step(own.rows_of(own.x), own.rows_of(own.y), weighted_mse);
      checks.expect(own.as_expected() && std::abs(outcome.loss - own.whole) < 1e-12,
                    "weighted losses, " + describe(own.stage_rank, own.replica));
    }
    const auto output = own.pipe->forward(own.rows_of(own.x));
    const at::NoGradGuard no_grad;
    checks.expect(output.tensors.empty() ||
                      at::allclose(output.tensors[0], own.model(own.rows_of(own.x)), 1e-12, 1e-14),
                  "outputs");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A replica without data takes part until all replicas have none",
          "[pipeline][replicas]") {
  const Watchdog watchdog("uneven replicas", std::chrono::seconds(60));
  Checks checks;
  run_grid([&](int number, Stores& stores) {
    Rank own(number, stores, {"1f1b"});
    auto& pipe = *own.pipe;
    const int64_t batches = own.replica == 0 ? 2 : 1;
    const auto next = [&](int64_t done) { return done < batches ? Next::yes : Next::no; };
    const auto name = describe(own.stage_rank, own.replica);
    checks.expect(pipe.begin_loop(next(0), std::nullopt), "a loop of " + name);
    int64_t steps = 0;
    while (!pipe.at_end()) {
      checks.expect(pipe.expects_step() || steps == 0, "a step is awaited by " + name);
      own.expect_of([&](const auto& output, const auto& target) {
        return steps == 0 ? mse(output, target)
                          : mse(output.narrow(0, 0, kRows[0]), target.narrow(0, 0, kRows[0]));
      });
      pipe.announce_next(next(steps + 1), kRows[own.replica]);
      const auto outcome = steps < batches ? own.step() : pipe.step_without_data();
      ++steps;
      checks.expect(own.as_expected(), "gradients of " + name);
      checks.expect(outcome.weight == kRows[0] + (steps == 1 ? kRows[1] : 0), "weight, " + name);
      checks.expect(outcome.last == (steps == 2), "the end, " + name);
    }
    checks.expect(steps == 2 && pipe.steps() == 2, "steps of " + name);
    checks.expect(!pipe.begin_loop(Next::no, std::nullopt), "no loop of " + name);
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A rank that fails between two steps fails the next one of all", "[pipeline][replicas]") {
  const Watchdog watchdog("a failure between steps", std::chrono::seconds(60));
  Checks checks;
  run_grid([&](int number, Stores& stores) {
    Rank own(number, stores, {"1f1b"});
    own.expect_of(mse);
    own.pipe->begin_loop(Next::yes, kRows[own.replica]);
    std::string said;
    if (number == 1) {
      own.pipe->report_failure(std::make_exception_ptr(std::runtime_error("no disk")));
      said = "no disk";
    } else {
      try {
        own.step();
      } catch (const RankFailed& error) {
        said = error.what();
      }
    }
    const auto name = describe(own.stage_rank, own.replica);
    checks.expect(said.find("no disk") != std::string::npos, said + " on " + name);
    own.step();
    checks.expect(own.as_expected(), "gradients of " + name);
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Copies of a tied weight in replicas get the mean over the rows of all, summed",
          "[pipeline][replicas]") {
  const Watchdog watchdog("tied weights of replicas", std::chrono::seconds(60));
  const auto schedule = GENERATE(values<std::string>({"1f1b", "zb_h1"}));
  Checks checks;
  run_grid([&](int number, Stores& stores) {
    Rank own(number, stores, {schedule, 1}, /*reduces=*/true, /*ties=*/true);
    own.expect_of(
        [](const auto& output, const auto& target) { return weighted_mse(output, target).loss; });
    for (int step = 1; step <= 3; ++step) {  // the first is divided by another number in the end
      own.pipe->step(own.rows_of(own.x), own.rows_of(own.y), weighted_mse);
      checks.expect(own.as_expected(step),
                    describe(own.stage_rank, own.replica) + ", step " + std::to_string(step));
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Buckets are launched behind a stage's last backward, before the other stages are done",
          "[pipeline][replicas]") {
  const Watchdog watchdog("buckets in the bubble");
  Checks checks;
  // Of a backward that is split the parameters get their gradients in W.
  const auto [schedule, kind] = GENERATE(table<std::string, ActionKind>(
      {{"interleaved_1f1b", ActionKind::backward}, {"zb_h1", ActionKind::backward_weight}}));
  CAPTURE(schedule);
  run_grid([&, last = kind, name_of_schedule = schedule](int number, Stores& stores) {
    Rank own(number, stores, {name_of_schedule, 2});
    own.expect_of(mse);
    own.step();
    const int upper = own.own_stages.back();  // its backwards come first, and others follow them
    bool is_over = false;
    int followed = 0;
    for (const auto& [before, stage, launched, buckets] : own.left) {
      const auto name =
          pipeline::to_string(before) + " of " + describe(own.stage_rank, own.replica);
      if (stage == upper) {
        checks.expect(launched == (is_over ? buckets - 1 : 0), "buckets left before " + name);
        followed += is_over ? 1 : 0;
        is_over |= before == Action{upper, last, kMicrobatches - 1};
      } else {
        checks.expect(launched == 0, "the lower stage's buckets before " + name);
      }
    }
    checks.expect(followed > 0, "there are actions behind it");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Whatever fails on a rank of a replica, all ranks of all replicas learn it",
          "[pipeline][replicas][faults]") {
  const QuietLog quiet;
  const Watchdog watchdog("faults in replicas", std::chrono::seconds(110));
  const auto wanted = GENERATE(values<Case>({{"1f1b", 1}, {"zb_h1", 1}, {"zbv", 2}}));
  CAPTURE(wanted.schedule);
  Checks checks;
  run_grid([&](int number, Stores& stores) {
    Rank own(number, stores, wanted);
    own.expect_of(mse);
    own.step();
    const auto order = own.pipe->schedule(kMicrobatches);
    for (int failing = 0; failing < kRanks * kReplicas; ++failing) {
      for (int index = 0; index < std::ssize(order.ranks[failing % kRanks]); ++index) {
        const auto name = describe(failing % kRanks, failing / kRanks) + ", action " +
                          std::to_string(index) + ", seen by " +
                          describe(own.stage_rank, own.replica);
        own.model.zero_grad();
        own.fail_at = index;
        own.fail_left = number == failing ? 1 : 0;
        std::string text;
        const auto began = std::chrono::steady_clock::now();
        try {
          own.step();
        } catch (const RankFailed& error) {
          text = "RankFailed: " + std::string(error.what_without_backtrace());
          checks.expect(error.rank() == failing % kRanks, name + ": names the rank");
        } catch (const std::exception& error) {
          text = error.what();
        }
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
        checks.expect(took.count() < 1.5, name + ": returns soon");
        own.fail_left = 0;
        const auto start = number == failing ? "planted (in the " : "RankFailed: ";
        const auto where = describe(failing % kRanks, failing / kRanks);
        checks.expect(text.find(start) == 0 && text.find("planted") != std::string::npos &&
                          (number == failing || text.find(where) != std::string::npos),
                      name + ": " + text);
        const auto gradients = own.model.gradients();
        checks.expect(std::none_of(gradients.begin(), gradients.end(),
                                   [](const auto& g) { return g.defined(); }),
                      name + ": no gradient is left");
        own.step();
        checks.expect(own.as_expected(), name + ": the next step");
      }
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Memory that runs out in any action of any rank repeats the step on all four",
          "[pipeline][replicas][faults]") {
  const QuietLog quiet;
  const Watchdog watchdog("shortages in replicas", std::chrono::seconds(60));
  const auto wanted = GENERATE(values<Case>({{"1f1b", 1, 3}, {"zb_h1", 1, 3}, {"zbv", 2, 2}}));
  CAPTURE(wanted.schedule);
  Checks checks;
  run_grid([&](int number, Stores& stores) {
    const Seat seat(number, stores);
    const auto order = Rank(seat, wanted).pipe->schedule(wanted.microbatches);
    for (int failing = 0; failing < kRanks * kReplicas; ++failing) {
      for (int index = 0; index < std::ssize(order.ranks[failing % kRanks]); ++index) {
        const auto name = describe(failing % kRanks, failing / kRanks) + ", action " +
                          std::to_string(index) + ", seen by " + describe(seat.rank, seat.replica);
        Rank own(seat, wanted);  // that has not run out before
        own.expect_of(mse);
        own.out_of_memory = true;
        own.fail_at = index;
        own.fail_left = number == failing ? 1 : 0;
        try {
          const auto outcome = own.step();
          const bool finer = seat.replica == failing / kRanks;
          checks.expect(outcome.retries == 1, name + ": repeated");
          checks.expect(outcome.pieces == wanted.microbatches * (finer ? 2 : 1),
                        name + ": microbatches");
          checks.expect(own.as_expected(), name + ": gradients");
        } catch (const std::exception& error) {
          checks.expect(false, name + ": " + error.what());
        }
      }
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Only the replica that ran out of memory takes more microbatches",
          "[pipeline][replicas][faults]") {
  const QuietLog quiet;
  const Watchdog watchdog("one replica");
  Checks checks;
  run_grid([&](int number, Stores& stores) {
    Rank own(number, stores, {"1f1b", 1});
    own.expect_of(mse);
    own.out_of_memory = true;
    own.fail_at = 3;
    own.fail_left = number == 2 ? 1 : 0;
    const auto outcome = own.step();
    checks.expect(outcome.retries == 1, "all repeat the step");
    checks.expect(outcome.pieces == (own.replica == 1 ? 7 : 4), "microbatches");
    checks.expect(own.as_expected(), "gradients");
    own.model.zero_grad();
    own.step();  // whose microbatches depend on the rows now
    checks.expect(own.as_expected(), "the next step");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("What fails where gradients come, and at the step's end, fails on all replicas",
          "[pipeline][replicas][faults]") {
  const QuietLog quiet;
  const Watchdog watchdog("faults of hooks in replicas", std::chrono::seconds(60));
  const auto wanted = GENERATE(values<Case>({{"1f1b", 1}, {"zb_h1", 1}}));
  CAPTURE(wanted.schedule);
  Checks checks;
  run_grid([&](int number, Stores& stores) {
    Rank own(number, stores, wanted);
    own.expect_of(mse);
    int calls = 0;
    int at = -1;
    for (const int i : own.own_stages) {
      for (const auto& parameter : own.model.layers[i].parameters()) {
        parameter.register_hook([&](const at::Tensor&) {
          if (calls++ == at) {
            own.fail();
          }
        });
      }
    }
    for (int failing = 0; failing < kRanks * kReplicas; ++failing) {
      for (int call = 0; call < 2 * kMicrobatches; ++call) {
        const auto name = describe(failing % kRanks, failing / kRanks) + ", hook " +
                          std::to_string(call) + ", seen by " +
                          describe(own.stage_rank, own.replica);
        own.model.zero_grad();
        calls = 0;
        at = number == failing ? call : -1;
        bool raised = false;
        try {
          own.step();
        } catch (const std::exception& error) {
          raised = std::string(error.what()).find("planted") != std::string::npos;
        }
        checks.expect(raised, name);
        at = -1;
        own.step();
        checks.expect(own.as_expected(), name + ": the next step");
      }
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A batch that is refused on one rank is refused on all of all replicas",
          "[pipeline][replicas][faults]") {
  const QuietLog quiet;
  const Watchdog watchdog("refused batches in replicas");
  const bool at_once = GENERATE(true, false);  // in the first step
  CAPTURE(at_once);
  Checks checks;
  run_grid([&](int number, Stores& stores) {
    Rank own(number, stores, {"1f1b", 1});
    own.expect_of(mse);
    if (!at_once) {
      own.step();
    }
    for (int failing = 0; failing < kRanks * kReplicas; ++failing) {
      for (const int64_t rows :
           {2, 5}) {  // others than the peers have, and fewer than microbatches
        own.model.zero_grad();
        std::string text;
        try {
          number == failing
              ? own.pipe->step(own.x.narrow(0, 0, rows), own.y.narrow(0, 0, rows), mse)
              : own.step();
        } catch (const std::exception& error) {
          text = error.what();
        }
        checks.expect(text.find("different sizes") != std::string::npos,
                      describe(own.stage_rank, own.replica) + ": " + text);
      }
    }
    own.step();
    checks.expect(own.as_expected(), "the next step");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A rank whose stages are in no reducer, while its pipeline's others are, fails on all",
          "[pipeline][replicas]") {
  const QuietLog quiet;
  const Watchdog watchdog("a rank without reducers");
  Checks checks;
  run_grid([&](int number, Stores& stores) {
    Rank own(number, stores, {"1f1b", 1}, number % kRanks == 0);
    std::string text;
    try {
      own.step();
    } catch (const c10::ValueError& error) {
      text = error.what_without_backtrace();
    }
    checks.expect(text.find("the replicas of their stages") != std::string::npos,
                  "raised: " + text);
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("All stages that are trained are reduced, or none", "[pipeline][replicas]") {
  Checks checks;
  run_ranks({2}, [&](int, const Group& group) {
    Layers model(2);
    PipelineOptions options;
    options.reducers.push_back(Reducer::create(model.layers[0].parameters(), {}, group));
    bool raised = false;
    try {
      Pipeline(model.stages(), options);
    } catch (const c10::ValueError& error) {
      raised = std::string(error.what()).find("in no reducer") != std::string::npos;
    }
    checks.expect(raised, "a stage without a reducer");
    const Layers other(1);
    options.reducers.push_back(Reducer::create(other.parameters(), {}, group));
    raised = false;
    try {
      Pipeline(model.stages(), options);
    } catch (const c10::ValueError& error) {
      raised = std::string(error.what()).find("no stage of this process") != std::string::npos;
    }
    checks.expect(raised, "a reducer of no stage");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Threads of one process have reducers too", "[pipeline][replicas]") {
  const QuietLog quiet;
  const Watchdog watchdog("replicas of threads", std::chrono::seconds(60));
  const auto wanted = GENERATE(values<Case>({{"1f1b", 1}, {"zb_h1", 1}, {"zbv", 2}}));
  CAPTURE(wanted.schedule);
  Checks checks;
  run_ranks({kReplicas}, [&](int replica, const Group& group) {
    const Layers model(kRanks * wanted.per_rank);
    const auto x = filled({kRows[0] + kRows[1], 4}, 3, at::kDouble);
    const auto y = filled({kRows[0] + kRows[1], 4}, 4, at::kDouble);
    mse(model(x), y).backward();
    const auto expected = copies(model.gradients());
    model.zero_grad();
    PipelineOptions options;
    ReducerOptions buckets;
    buckets.first_bucket_cap_mb = buckets.bucket_cap_mb.emplace(1e-5);
    buckets.plan = "registration";
    for (const auto& layer : model.layers) {
      options.reducers.push_back(Reducer::create(layer.parameters(), {}, group, buckets));
    }
    options.devices.assign(kRanks, c10::Device(c10::DeviceType::CPU));
    options.schedule = wanted.schedule;
    options.microbatches = kMicrobatches;
    int fail_left = 0;
    options.before_action = [&](int rank, int index, const Action&) {
      if (rank == 1 && index == 5 && fail_left-- > 0) {
        throw std::runtime_error("planted");
      }
    };
    Pipeline pipe(model.stages(), options);
    const auto step = [&] {
      const auto begin = replica == 0 ? 0 : kRows[0];
      pipe.step(x.narrow(0, begin, kRows[replica]), y.narrow(0, begin, kRows[replica]), mse);
    };
    for (int failing = -1; failing < kReplicas; ++failing) {
      fail_left = failing == replica ? 1 : 0;
      bool raised = false;
      try {
        step();
      } catch (const std::exception& error) {
        raised = std::string(error.what()).find("planted") != std::string::npos;
      }
      checks.expect(raised == (failing >= 0), "raised on replica " + std::to_string(replica));
      model.zero_grad();
      step();
      checks.expect(all_close(model.gradients(), expected),
                    "gradients of replica " + std::to_string(replica));
      model.zero_grad();
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

}  // namespace test_pipeline_replicas
