// Stages of torch::nn that are recomputed, where one row does not fit otherwise.
#include <ATen/ATen.h>
#include <brimful/pipeline/nn_stages.h>
#include <brimful/pipeline/skip.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include "support/catch.h"
#include "support/quiet_log.h"
#include "support/stages.h"
#include "support/watchdog.h"

#include <brimful/error.h>
#include <brimful/memory/stats.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace test_pipeline_recompute {

using namespace brimful;
using namespace brimful::test;
using pipeline::Pipeline;
using pipeline::PipelineOptions;
using pipeline::Stage;
namespace nn = torch::nn;

namespace {
constexpr int64_t kRows = 4;
constexpr int64_t kWidth = 64;
const c10::Device kCpu(c10::DeviceType::CPU);

/// Each row is a matrix.
nn::Sequential block(int layers) {
  nn::Sequential model;
  for (int i = 0; i < layers; ++i) {
    model->push_back(nn::Linear(kWidth, kWidth));
    model->push_back(nn::BatchNorm1d(256));  // over what a row has
    model->push_back(nn::Dropout(0.3));
    model->push_back(nn::GELU());
  }
  return model;
}

struct Ended {
  Outcome outcome;
  std::vector<at::Tensor> left;  ///< gradients, buffers, and the generator's state
  int64_t peak = 0;
};

Ended step(const std::string& schedule, std::optional<int64_t> limit,
           const std::function<void(PipelineOptions&)>& change = {}, int layers = 4) {
  at::manual_seed(5);
  const int stages = schedule == "gpipe" ? 2 : 4;
  std::vector<nn::Sequential> parts;
  std::vector<Stage> made;
  for (int i = 0; i < stages; ++i) {
    parts.push_back(block(layers));
    made.push_back(pipeline::stage_of(parts.back()));
  }
  PipelineOptions options;
  options.schedule = schedule;
  options.microbatches = kRows;
  options.batch_norm = BatchNormPolicy::rescale;
  if (change) {
    change(options);
  }
  const auto x = filled({kRows, 256, kWidth}, 3);
  const auto y = filled({kRows, 256, kWidth}, 4);
  Pipeline pipe(std::move(made), std::move(options));
  const auto used = memory::stats(kCpu).used_bytes;
  Ended ended;
  memory::set_limit(kCpu, limit ? std::optional(used + *limit) : std::nullopt);
  try {
    ended.outcome = pipe.step(x, y, mse);
  } catch (...) {
    memory::set_limit(kCpu, std::nullopt);
    throw;
  }
  memory::set_limit(kCpu, std::nullopt);
  ended.peak = ended.outcome.peak_bytes - used;
  for (const auto& part : parts) {
    for (const auto& parameter : part->parameters()) {
      ended.left.push_back(parameter.grad());
    }
    for (const auto& buffer : part->buffers()) {
      ended.left.push_back(buffer);
    }
  }
  ended.left.push_back(at::globalContext().defaultGenerator(kCpu).get_state());
  return ended;
}

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return at::equal(x, y); });
}
}  // namespace

TEST_CASE("A row that does not fit is run with stages recomputed, to the same bits",
          "[pipeline][recompute]") {
  const QuietLog quiet;
  memory::install();
  const Watchdog watchdog("recomputed stages", std::chrono::seconds(90));
  const std::string schedule = GENERATE("gpipe", "1f1b", "zb_h1");
  CAPTURE(schedule);
  const auto plain = step(schedule, std::nullopt);
  const auto all =
      step(schedule, std::nullopt, [](auto& options) { options.recompute_all = true; });
  CHECK(recomputed_stages(plain.outcome).empty());
  CHECK(recomputed_stages(all.outcome).size() == all.outcome.stages.size());
  CHECK(same(all.left, plain.left));
  REQUIRE(all.peak < plain.peak);
  const auto limit = (all.peak + plain.peak) / 2;
  const auto climbed = step(schedule, limit);
  CHECK(!recomputed_stages(climbed.outcome).empty());
  CHECK(climbed.outcome.pieces == kRows);
  CHECK(same(climbed.left, plain.left));
  CHECK_THROWS_AS(step(schedule, limit, [](auto& options) { options.recompute = false; }),
                  BatchTooLarge);
  CHECK_THROWS_AS(step(schedule, limit, [](auto& options) { options.max_retries = 0; }),
                  BatchTooLarge);
}

TEST_CASE("What stages save is offloaded where recomputing is not allowed, or not enough",
          "[pipeline][recompute]") {
  const QuietLog quiet;
  memory::install();
  const Watchdog watchdog("offloaded stages", std::chrono::seconds(90));
  const std::string schedule = GENERATE("gpipe", "1f1b", "zb_h1");
  CAPTURE(schedule);
  constexpr int kLayers = 16;
  const auto plain = step(schedule, std::nullopt, {}, kLayers);
  // A second run takes what one microbatch saves in a stage, beside all inputs and gradients, which are half as much.
  const auto& stage = plain.outcome.stages[0];
  const auto limit = stage.peak_live_bytes / stage.peak_live * 5 / 4;
  CHECK_THROWS_AS(step(schedule, limit, {}, kLayers), BatchTooLarge);
  for (const bool recompute : {true, false}) {
    CAPTURE(recompute);
    const auto offloaded = step(
        schedule, limit,
        [&](auto& options) {
          options.offload = true;
          options.recompute = recompute;
        },
        kLayers);
    CHECK(same(offloaded.left, plain.left));
    const auto& attempts = offloaded.outcome.attempts;
    CHECK(recompute == std::any_of(attempts.begin(), attempts.end(), [](const auto& attempt) {
            return !attempt.rungs.recomputed.empty();
          }));
    CHECK(offloaded.outcome.rungs.offloaded.size() == offloaded.outcome.stages.size());
    CHECK(offloaded.outcome.stages[1].offloaded);
    CHECK(recomputed_stages(offloaded.outcome).empty());
  }
}

TEST_CASE("Stages that are to be recomputed are known by their numbers", "[pipeline][recompute]") {
  memory::install();
  const auto some = step("gpipe", std::nullopt, [](auto& options) { options.recomputed = {1}; });
  CHECK(recomputed_stages(some.outcome) == std::vector<int>{1});
  CHECK(!some.outcome.stages[0].recomputed);
  CHECK(some.outcome.stages[1].recomputed);
  CHECK_THROWS_WITH(step("gpipe", std::nullopt, [](auto& options) { options.recomputed = {2}; }),
                    Catch::Contains("there is no such stage to recompute (stage: 2, stages: 2)"));
}

TEST_CASE("What a recomputed stage stashes and pops itself is in its second graph",
          "[pipeline][recompute]") {
  const Watchdog watchdog("skips of recomputed stages");
  const auto gradients = [](bool recomputed) {
    const Layers model(2);
    std::vector<Stage> stages;
    for (const auto& layer : model.layers) {
      stages.push_back(pipeline::make_stage(
          [layer, is_first = stages.empty()](const at::Tensor& x) {
            pipeline::stash("own", layer(x));
            auto y = at::sin(layer(x)) * pipeline::pop("own");
            if (is_first) {
              pipeline::stash("far", layer(y));
              return y;
            }
            return at::Tensor(y + pipeline::pop("far"));
          },
          layer.parameters()));
    }
    PipelineOptions options;
    options.microbatches = 3;
    options.recompute_all = recomputed;
    Pipeline pipe(std::move(stages), std::move(options));
    const auto outcome =
        pipe.step(filled({6, 4}, 3, at::kDouble), filled({6, 4}, 4, at::kDouble), mse);
    CHECK(recomputed_stages(outcome).size() == (recomputed ? 2 : 0));
    return model.gradients();
  };
  CHECK(same(gradients(true), gradients(false)));
}

}  // namespace test_pipeline_recompute
