#include <brimful/memory/stats.h>
#include <brimful/pipeline/schedules.h>
#include "support/catch.h"
#include "support/stages.h"
#include "support/watchdog.h"

namespace test_pipeline {

using namespace brimful;
using namespace brimful::test;
using pipeline::Pipeline;
using pipeline::PipelineOptions;

namespace {

struct Case {
  std::string schedule;
  int ranks;
  int stages;
};

PipelineOptions options_for(const Case& wanted, int64_t microbatches) {
  PipelineOptions options;
  options.schedule = wanted.schedule;
  options.devices.assign(wanted.ranks, c10::Device(c10::DeviceType::CPU));
  options.microbatches = microbatches;
  return options;
}
}  // namespace

TEST_CASE("A step through two stages has the gradients of the whole model", "[pipeline]") {
  const Watchdog watchdog("two stages");
  const Layers model(2);
  const auto x = filled({8, 4}, 3, at::kDouble);
  const auto y = filled({8, 4}, 4, at::kDouble);
  const auto whole = mse(model(x), y);
  whole.backward();
  const auto expected = copies(model.gradients());
  model.zero_grad();

  Pipeline pipe(model.stages(), options_for({"1f1b", 2, 2}, 4));
  const auto outcome = pipe.step(x, y, mse);
  CHECK(all_close(model.gradients(), expected));
  CHECK(outcome.loss == Approx(whole.item<double>()).epsilon(1e-12));
  CHECK(outcome.pieces == 4);
  CHECK(outcome.split == std::vector<int64_t>{2, 2, 2, 2});
  CHECK(outcome.stages.at(0).peak_live == 2);
  CHECK(outcome.stages.at(1).peak_live == 1);
}

TEST_CASE("Every schedule gives the gradients of the whole model, uneven microbatches too",
          "[pipeline]") {
  const Watchdog watchdog("schedules", std::chrono::seconds(60));
  const auto wanted = GENERATE(values<Case>({{"gpipe", 3, 3},
                                             {"1f1b", 4, 4},
                                             {"1f1b", 1, 1},
                                             {"interleaved_1f1b", 2, 4},
                                             {"looped_bfs", 2, 6},
                                             {"zb_h1", 3, 3},
                                             {"zb_h2", 3, 3},
                                             {"zbv", 2, 4},
                                             {"dualpipev", 2, 4}}));
  const auto microbatches = GENERATE(1, 2, 5, 8, 15);  // the last: more than rows
  CAPTURE(wanted.schedule, microbatches);
  const Layers model(wanted.stages);
  const auto x = filled({13, 4}, 3, at::kDouble);
  const auto y = filled({13, 4}, 4, at::kDouble);
  const auto whole = mse(model(x), y);
  whole.backward();
  const auto expected = copies(model.gradients());
  model.zero_grad();

  Pipeline pipe(model.stages(), options_for(wanted, microbatches));
  for (int step = 0; step < 3; ++step) {
    const auto outcome = pipe.step(x, y, mse);
    REQUIRE(all_close(model.gradients(), expected));
    REQUIRE(outcome.loss == Approx(whole.item<double>()).epsilon(1e-12));
    model.zero_grad();
  }
  const at::NoGradGuard no_grad;
  const auto output = pipe.forward(x);
  REQUIRE(output.tensors.size() == 1);
  CHECK(at::allclose(output.tensors[0], model(x), 1e-12, 1e-14));
}

}  // namespace test_pipeline
