// What a step gives to the tensors that its caller passes.
#include <ATen/ATen.h>
#include <brimful/pipeline/keywords.h>
#include <brimful/pipeline/pipeline.h>
#include "support/catch.h"
#include "support/quiet_log.h"
#include "support/stages.h"
#include "support/watchdog.h"

#include <map>

namespace test_pipeline_inputs {

using namespace brimful;
using namespace brimful::test;
using pipeline::Pipeline;
using pipeline::PipelineOptions;

TEST_CASE("Inputs and keywords get their gradients, in steps that are repeated too",
          "[pipeline][inputs]") {
  const QuietLog quiet;
  const Watchdog watchdog("gradients of inputs");
  const std::string schedule = GENERATE("gpipe", "1f1b", "zb_h1");
  const int shortages = GENERATE(0, 1);
  const Layers model(2);
  auto parts = model.stages();
  for (auto& part : parts) {
    part.forward = [inner = part.forward](const pipeline::Value& input) {
      return pipeline::value_of(inner(input).tensors[0] * pipeline::keyword("mask") +
                                pipeline::keyword("table"));
    };
  }
  const auto x = filled({8, 4}, 3, at::kDouble).set_requires_grad(true);
  const auto front = filled({4}, 6, at::kDouble).set_requires_grad(true);
  const auto mask = filled({8, 1}, 5, at::kDouble).set_requires_grad(true);
  const auto table = filled({4}, 7, at::kDouble).set_requires_grad(true);
  const auto y = filled({8, 4}, 4, at::kDouble);
  const auto taken = [&] {
    std::vector<at::Tensor> gradients;
    for (const auto& leaf : {x, front, mask, table}) {
      gradients.push_back(leaf.grad());
      leaf.mutable_grad().reset();
    }
    return gradients;
  };
  auto h = x * front;
  for (const auto& layer : model.layers) {
    h = layer(h) * mask + table;
  }
  mse(h, y).backward();
  const auto expected = taken();
  const auto of_model = copies(model.gradients());
  model.zero_grad();

  PipelineOptions options;
  options.schedule = schedule;
  options.microbatches = 2;
  std::atomic<int> left = shortages;
  options.before_action = [&](int rank, int index, const pipeline::Action&) {
    if (rank == 0 && index == 2 && left.fetch_sub(1) > 0) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "planted");
    }
  };
  Pipeline pipe(parts, options);
  using Keyword = std::variant<at::Tensor, Along, Shared<at::Tensor>>;
  const std::map<std::string, Keyword> keywords{{"mask", mask},
                                                {"table", Shared<at::Tensor>{table}}};
  CHECK(pipe.step(at::Tensor(x * front), y, mse, keywords).retries == shortages);
  CHECK(all_close(model.gradients(), of_model));
  CHECK(all_close(taken(), expected));
}

}  // namespace test_pipeline_inputs
