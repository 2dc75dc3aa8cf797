// What ranks exchange once a step stands: sums of tied weights' gradients, and overflows. A rank that has no memory left for
// its part says so.
#include <ATen/ATen.h>
#include <brimful/error.h>
#include <brimful/launch/run_ranks.h>
#include <brimful/memory/fault.h>
#include <brimful/pipeline/peers.h>
#include <brimful/pipeline/pipeline.h>
#include <brimful/sizer/grad_scaler.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "support/catch.h"
#include "support/checks.h"
#include "support/quiet_log.h"
#include "support/stages.h"
#include "support/watchdog.h"

#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <limits>
#include <optional>

namespace test_pipeline_settle {

using namespace brimful;
using namespace brimful::test;
using pipeline::Pipeline;
using pipeline::PipelineOptions;

namespace {
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
constexpr int64_t kRows = 11;

/// The weights of the first and the last layer are one, of which each of their ranks has a copy.
struct Rank {
  Rank(int rank, const Group& group)
      : rank(rank), model(group->getSize()), last(group->getSize() - 1) {
    {
      const at::NoGradGuard no_grad;
      model.layers[last].weight.copy_(model.layers[0].weight);
    }
    mse(model(x), y).backward();
    expected = copies(model.gradients());
    expected[0] = expected[2 * last] = expected[0] + expected[2 * last];
    model.zero_grad();
    const auto& layer = model.layers[rank];
    PipelineOptions options;
    options.peers = pipeline::peers_of(group);
    options.microbatches = 2;
    if (rank == 0 || rank == last) {
      options.tied = {{"weight", layer.weight}};
    }
    options.scaler = &scaler;
    pipe.emplace(Pipeline({pipeline::make_stage(layer, layer.parameters())}, options));
  }
  auto step() { return pipe->step(x, y, mse); }
  bool as_expected() const {
    const auto gradients = model.gradients();
    return all_close({gradients[2 * rank], gradients[2 * rank + 1]},
                     {expected[2 * rank], expected[2 * rank + 1]});
  }

  int rank;
  Layers model;
  int last;
  at::Tensor x = filled({kRows, 4}, 3, at::kDouble);
  at::Tensor y = filled({kRows, 4}, 4, at::kDouble);
  std::vector<at::Tensor> expected;
  GradScaler scaler{[] {
    GradScalerOptions options;
    options.init_scale = 1;
    return options;
  }()};
  std::optional<Pipeline> pipe;
};
}  // namespace

// Each allocation of the thread that calls step(): before the actions, for the verdict, and after it.
TEST_CASE("A rank that has no memory around its actions leaves no other waiting",
          "[pipeline][processes][faults]") {
  const QuietLog quiet;
  const Watchdog watchdog("faults of the caller's thread", std::chrono::seconds(60));
  constexpr int ranks = 2;
  Checks checks;
  std::vector<std::atomic<int64_t>> allocations(ranks);
  std::vector<std::atomic<bool>> raised(ranks);
  std::barrier together(ranks);
  run_ranks({ranks}, [&](int rank, const Group& group) {
    {
      Rank own(rank, group);
      own.step();
      checks.expect(own.as_expected(), "gradients are the sum of the copies'");
      own.model.zero_grad();
      const memory::FaultAt none(1 << 20, /*unlimited_too=*/true);
      own.step();
      allocations[rank] = none.seen();
      together.arrive_and_wait();
      checks.expect(allocations[rank] > 10, "there is something to refuse");
    }
    for (int failing = 0; failing < ranks; ++failing) {
      for (int64_t index = 0; index < allocations[failing]; ++index) {
        const auto name = "rank " + std::to_string(failing) + ", allocation " +
                          std::to_string(index) + ", seen by rank " + std::to_string(rank);
        Rank own(rank, group);
        own.step();
        own.model.zero_grad();
        std::optional<memory::FaultAt> fault;
        if (rank == failing) {
          fault.emplace(index, /*unlimited_too=*/true);
        }
        const auto began = std::chrono::steady_clock::now();
        std::string text;
        try {
          own.step();
        } catch (const std::exception& error) {
          text = error.what();
        }
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
        checks.expect(took.count() < 1, name + ": returns within a second");
        checks.expect(rank != failing || fault->fired(), name + ": was refused");
        fault.reset();
        raised[rank] = !text.empty();
        together.arrive_and_wait();
        checks.expect(raised[failing] == raised[rank], name + ": ends alike: " + text);
        const auto gradients = own.model.gradients();
        checks.expect(text.empty() ? own.as_expected()
                                   : std::none_of(gradients.begin(), gradients.end(),
                                                  [](const auto& g) { return g.defined(); }),
                      name + ": gradients: " + text);
        own.model.zero_grad();
        own.step();
        checks.expect(own.as_expected(), name + ": the next step");
        together.arrive_and_wait();
      }
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

// What the first rank's gradient, which is sparse, takes when it is summed comes behind the verdict.
TEST_CASE("Ranks that share no weight learn what fails behind the verdict",
          "[pipeline][processes][faults]") {
  const QuietLog quiet;
  const Watchdog watchdog("a failure behind the verdict", std::chrono::seconds(60));
  constexpr int ranks = 3;
  constexpr int64_t kWords = 6;
  Checks checks;
  std::atomic<int64_t> allocations{0};
  std::array<std::atomic<bool>, ranks> raised{};
  std::barrier together(ranks);
  run_ranks({ranks}, [&](int rank, const Group& group) {
    const Layer middle(1);
    const auto weight = filled({kWords, 4}, 3, at::kDouble).requires_grad_();
    const std::array<pipeline::Stage, ranks> stages{
        pipeline::make_stage(
            [&](const at::Tensor& words) { return at::embedding(weight, words, -1, false, true); },
            {weight}),
        pipeline::make_stage(middle, middle.parameters()),
        pipeline::make_stage([&](const at::Tensor& x) { return at::matmul(x, weight.t()); },
                             {weight})};
    PipelineOptions options;
    options.peers = pipeline::peers_of(group);
    options.microbatches = 2;
    if (rank != 1) {
      options.tied = {{"weight", weight}};
    }
    Pipeline pipe({stages[rank]}, options);
    const auto words = at::arange(kRows).remainder(kWords);
    const auto y = filled({kRows, kWords}, 4, at::kDouble);
    const auto& trained = rank == 1 ? middle.weight : weight;
    pipe.step(words, y, mse);
    trained.mutable_grad().reset();
    {
      const memory::FaultAt none(1 << 20, /*unlimited_too=*/true);
      pipe.step(words, y, mse);
      if (rank == 0) {
        allocations = none.seen();
      }
    }
    const auto expected = trained.grad().clone();
    together.arrive_and_wait();
    bool told = false;
    for (int64_t index = 0; index < allocations; ++index) {
      const auto name =
          "allocation " + std::to_string(index) + ", seen by rank " + std::to_string(rank);
      trained.mutable_grad().reset();
      std::optional<memory::FaultAt> fault;
      if (rank == 0) {
        fault.emplace(index, /*unlimited_too=*/true);
      }
      std::string text;
      try {
        pipe.step(words, y, mse);
      } catch (const std::exception& error) {
        text = error.what();
      }
      fault.reset();
      told |= text.find("could not finish a step that all ranks had found good") != text.npos;
      raised[rank] = !text.empty();
      together.arrive_and_wait();
      checks.expect(raised[0] == raised[rank], name + ": ends alike: " + text);
      checks.expect(
          text.empty() ? at::allclose(trained.grad(), expected) : !trained.grad().defined(),
          name + ": gradients");
      together.arrive_and_wait();
    }
    checks.expect(rank != 1 || told, "there is a failure behind the verdict");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Gradients that overflow on one rank make the scalers of all skip the step",
          "[pipeline][processes]") {
  const Watchdog watchdog("an overflow on one rank");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    for (int overflowing = 0; overflowing < 2; ++overflowing) {
      const auto name = "overflow on rank " + std::to_string(overflowing) + ", seen by rank " +
                        std::to_string(rank);
      Rank own(rank, group);
      const auto& layer = own.model.layers[rank];
      int steps = 0;
      const auto step = [&](bool overflows) {
        const auto before = steps;
        unsigned hook = 0;
        if (overflows) {  // what goes to the other rank is finite
          hook = layer.bias.register_hook([](const at::Tensor& gradient) {
            return at::Tensor(gradient * std::numeric_limits<double>::infinity());
          });
        }
        own.step();
        own.scaler.step_if_finite(&own, layer.parameters(), [&] { ++steps; });
        own.scaler.update();
        own.model.zero_grad();
        if (overflows) {
          layer.bias.remove_hook(hook);
        }
        return steps > before;
      };
      checks.expect(step(false), name + ": a good step is made");
      const auto scale = own.scaler.scale_factor();
      const auto is_overflowing = rank == overflowing;
      checks.expect(!step(is_overflowing), name + ": the step is skipped");
      checks.expect(own.scaler.scale_factor() == scale / 2, name + ": the scale is halved");
      checks.expect(step(false), name + ": the next one is made");
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Copies of a weight in one process get the sum of their gradients", "[pipeline]") {
  const Watchdog watchdog("tied in one process");
  const auto schedule = GENERATE(values<std::string>({"1f1b", "zb_h1"}));
  const auto x = filled({kRows, 4}, 3, at::kDouble);
  const auto y = filled({kRows, 4}, 4, at::kDouble);
  const Layers model(3);
  PipelineOptions options;
  options.microbatches = 4;
  options.schedule = schedule;
  options.tied = {{"weight", model.layers[0].weight}, {"weight", model.layers[2].weight}};
  Pipeline pipe(model.stages(), options);
  CHECK(at::equal(model.layers[0].weight, model.layers[2].weight));
  mse(model(x), y).backward();
  auto expected = copies(model.gradients());
  model.zero_grad();
  expected[0] = expected[4] = expected[0] + expected[4];
  pipe.step(x, y, mse);
  CHECK(all_close(model.gradients(), expected));
  pipe.step(x, y, mse);  // adds to those that are there
  for (auto& gradient : expected) {
    gradient = gradient * 2;
  }
  CHECK(all_close(model.gradients(), expected));
  CHECK(at::equal(model.layers[0].weight.grad(), model.layers[2].weight.grad()));
}

TEST_CASE("Weights that cannot be tied are refused", "[pipeline]") {
  const Layers model(2);
  const Layer wide(1, 4, 5);
  const auto& weight = model.layers[0].weight;
  const auto made = [&](std::vector<std::pair<std::string, at::Tensor>> tied) {
    PipelineOptions options;
    options.tied = std::move(tied);
    return Pipeline(model.stages(), options);
  };
  CHECK_THROWS_WITH(made({{"w", weight}}), Catch::Contains("one copy (name: w, group: none)"));
  CHECK_THROWS_WITH(made({{"w", weight}, {"w", weight}}), Catch::Contains("named twice (name: w)"));
  CHECK_THROWS_WITH(made({{"w", weight}, {"w", wide.weight}}),
                    Catch::Contains("copies of a tied weight differ"));
  auto frozen = model.layers[1].weight.detach();
  CHECK_THROWS_WITH(made({{"w", weight}, {"w", frozen}}), Catch::Contains("frozen"));
}

TEST_CASE("The schedule says on which device a stage is, and who may share a parameter",
          "[pipeline]") {
  const c10::Device first(c10::DeviceType::CUDA, 0);
  const c10::Device second(c10::DeviceType::CUDA, 1);
  using Devices = std::vector<c10::Device>;
  PipelineOptions options;
  options.devices = {first, second};
  std::vector<std::vector<at::Tensor>> parameters(4);
  const auto places = [&](const std::string& schedule) {
    options.schedule = schedule;
    return pipeline::stage_devices(options, parameters);
  };
  CHECK(places("interleaved_1f1b") == Devices{first, second, first, second});
  CHECK(places("zbv") == Devices{first, second, second, first});
  const Layer layer(1);
  parameters[0] = parameters[3] = layer.parameters();
  CHECK(places("zbv").size() == 4);
  CHECK_THROWS_WITH(places("looped_bfs"),
                    Catch::Contains("share a parameter (stages: 0 and 3, devices: cuda:0 and "
                                    "cuda:1); give each a copy"));
  CHECK_THROWS_WITH(places("1f1b"), Catch::Contains("1 stage a rank only"));
  parameters.resize(3);
  CHECK_THROWS_WITH(places("zbv"), Catch::Contains("stages: 3, devices: 2"));
}

}  // namespace test_pipeline_settle
