// A call that was ended does not wait for a stage that hangs, and is not changed by what the stage does later.
#include <ATen/CPUGeneratorImpl.h>
#include <brimful/pipeline/pipeline.h>
#include <torch/csrc/autograd/custom_function.h>
#include "support/catch.h"
#include "support/quiet_log.h"
#include "support/stages.h"
#include "support/watchdog.h"

#include <future>
#include <thread>

namespace test_pipeline_interrupts {

using namespace brimful;
using namespace brimful::test;
using pipeline::Pipeline;
using pipeline::PipelineOptions;

namespace {
/// Where a stage waits until it is let go.
struct Gate {
  std::promise<void> reached;
  std::promise<void> open;
  std::shared_future<void> opened = open.get_future().share();
  std::atomic<bool> closed{true};
  std::atomic<bool> passed{false};

  void pass() {
    if (closed.exchange(false)) {
      reached.set_value();
      opened.wait();
      passed = true;
    }
  }
};
std::shared_ptr<Gate> gate;

/// Waits at the gate in its backward.
struct Held : torch::autograd::Function<Held> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list gradients) {
    gate->pass();
    return gradients;
  }
};

at::Tensor cpu_state() {
  return at::detail::getDefaultCPUGenerator().get_state();
}
}  // namespace

TEST_CASE("A stage that hangs is abandoned, and its late gradients are dropped",
          "[pipeline][interrupts]") {
  const QuietLog quiet;
  const Watchdog watchdog("a stage that hangs");
  const std::string where = GENERATE("forward", "backward", "loss");
  CAPTURE(where);
  gate = std::make_shared<Gate>();
  const Layers model(3);
  const auto x = filled({6, 4}, 3, at::kDouble);
  const auto y = filled({6, 4}, 4, at::kDouble);
  mse(model(x), y).backward();
  const auto expected = copies(model.gradients());
  model.zero_grad();
  auto parts = model.stages();
  parts[1].forward = [&, inner = parts[1].forward](const pipeline::Value& input) {
    if (where == "forward") {
      gate->pass();
    }
    const auto h = inner(input).tensors[0];
    return pipeline::value_of(where == "backward" ? Held::apply(h) : h);
  };
  const auto loss = [&](const at::Tensor& output, const at::Tensor& target) {
    if (where == "loss") {
      gate->pass();
    }
    return mse(output, target);
  };
  PipelineOptions options;
  options.microbatches = 3;
  options.patience = std::chrono::milliseconds(100);
  auto pipe = std::make_unique<Pipeline>(parts, options);
  std::thread canceller([&] {
    gate->reached.get_future().wait();
    pipe->cancel();
  });
  const auto state = cpu_state();
  const auto began = std::chrono::steady_clock::now();
  CHECK_THROWS_AS(pipe->step(x, y, loss), pipeline::Interrupted);
  CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(1));
  canceller.join();
  CHECK_FALSE(pipe->is_usable());
  CHECK(at::equal(cpu_state(), state));
  for (const auto& gradient : model.gradients()) {
    CHECK_FALSE(gradient.defined());
  }
  CHECK_THROWS_WITH(pipe->step(x, y, loss), Catch::Contains("cannot be used any more"));
  CHECK_THROWS_WITH(pipe->forward(x), Catch::Contains("make a new one"));

  Pipeline fresh(parts, options);
  fresh.step(x, y, loss);
  CHECK(all_close(model.gradients(), expected));
  pipe.reset();
  gate->open.set_value();
  while (!gate->passed) {
    std::this_thread::yield();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(all_close(model.gradients(), expected));
  model.zero_grad();
  fresh.step(x, y, loss);
  CHECK(all_close(model.gradients(), expected));
}

}  // namespace test_pipeline_interrupts
