// Buffers that stages change, where a forward is repeated, undone, or runs again in backward.
#include <ATen/ATen.h>
#include <brimful/pipeline/nn_stages.h>
#include <brimful/pipeline/pipeline.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include "support/catch.h"
#include "support/quiet_log.h"
#include "support/stages.h"
#include "support/watchdog.h"

#include <memory>
#include <string>
#include <vector>

namespace test_pipeline_buffers {

using namespace brimful;
using namespace brimful::test;
using pipeline::Pipeline;
using pipeline::PipelineOptions;
using pipeline::Stage;
namespace nn = torch::nn;

namespace {
constexpr int64_t kRows = 8;
constexpr int64_t kWidth = 4;

/// Counts its rows in a buffer that its first forward makes larger, and in one that it changes in place.
struct CountingImpl : nn::Module {
  explicit CountingImpl(double dropout)
      : inner(register_module("inner", nn::Linear(kWidth, kWidth))),
        drop(register_module("drop", nn::Dropout(dropout))),
        seen(register_buffer("seen", at::zeros({1}))),
        rows(register_buffer("rows", at::zeros({}))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::NoGradGuard no_grad;
    if (seen.numel() == 1) {
      seen.resize_({3}).fill_(0);
    }
    seen.add_(x.size(0));
    rows.add_(x.size(0));
    const at::AutoGradMode with_grad(true);
    return drop(inner(x)).tanh();
  }
  nn::Linear inner;
  nn::Dropout drop;
  at::Tensor seen;
  at::Tensor rows;
};
TORCH_MODULE(Counting);

torch::jit::Module scripted() {
  torch::jit::Module module("Scripted");
  module.register_parameter("weight", filled({kWidth, kWidth}, 2).set_requires_grad(true), false);
  module.register_buffer("seen", at::zeros({}));
  module.define(R"(
def forward(self, x):
    self.seen = self.seen + x.size(0)
    return torch.dropout(torch.tanh(torch.linear(x, self.weight)), 0.1, True)
)");
  return module;
}

PipelineOptions options_of(bool recompute) {
  PipelineOptions options;
  options.microbatches = 4;
  options.recompute_all = recompute;
  return options;
}

struct Data {
  at::Tensor x = filled({kRows, kWidth}, 3);
  at::Tensor y = filled({kRows, kWidth}, 4);
};
}  // namespace

TEST_CASE("Buffers that a stage makes larger count each row once", "[pipeline]") {
  const QuietLog quiet;
  const Watchdog watchdog("buffers that become larger");
  const double dropout = GENERATE(0.0, 0.3);
  const bool recompute = GENERATE(false, true);
  CAPTURE(dropout, recompute);
  const std::vector<Counting> modules{Counting(dropout), Counting(dropout)};
  Pipeline pipe({pipeline::stage_of(modules[0]), pipeline::stage_of(modules[1])},
                options_of(recompute));
  const Data data;
  const auto require = [&](int64_t steps) {
    for (const auto& module : modules) {
      CHECK(at::equal(module->seen, at::full({3}, static_cast<float>(steps * kRows))));
      CHECK(module->rows.item<int64_t>() == steps * kRows);
    }
  };
  for (int step = 1; step < 4; ++step) {
    pipe.step(data.x, data.y, mse);
    require(step);
  }
  const auto failing = [](const at::Tensor&, const at::Tensor&) -> at::Tensor {
    throw std::runtime_error("planted");
  };
  CHECK_THROWS_WITH(pipe.step(data.x, data.y, failing), Catch::Contains("planted"));
  require(3);
}

TEST_CASE("A first step that fails leaves a buffer its size", "[pipeline]") {
  const QuietLog quiet;
  const Watchdog watchdog("a buffer's size");
  Counting module(0.0);
  Pipeline pipe({pipeline::stage_of(module)}, options_of(false));
  const Data data;
  const auto failing = [](const at::Tensor&, const at::Tensor&) -> at::Tensor {
    throw std::runtime_error("planted");
  };
  CHECK_THROWS_WITH(pipe.step(data.x, data.y, failing), Catch::Contains("planted"));
  CHECK(at::equal(module->seen, at::zeros({1})));
}

TEST_CASE("Buffers that a stage of TorchScript assigns anew count each row once", "[pipeline]") {
  const QuietLog quiet;
  const Watchdog watchdog("buffers that are assigned anew");
  const bool recompute = GENERATE(false, true);
  const auto modules = std::vector{scripted(), scripted()};
  Pipeline pipe({pipeline::stage_of(modules[0]), pipeline::stage_of(modules[1])},
                options_of(recompute));
  const Data data;
  for (int step = 1; step < 4; ++step) {
    pipe.step(data.x, data.y, mse);
    for (const auto& module : modules) {
      CHECK(module.attr("seen").toTensor().item<int64_t>() == step * kRows);
    }
  }
}

TEST_CASE("A second run finds TorchScript's buffers as before, and leaves those of now",
          "[pipeline]") {
  torch::jit::Module inner("Inner");
  inner.register_buffer("n", at::zeros({}));
  inner.define(R"(
def forward(self, x):
    self.n = self.n + 1
    return x + self.n
)");
  const auto run = [&] { return inner.forward({at::zeros({})}).toTensor().item<float>(); };
  SecondRun again(pipeline::detail::names_in(inner), {});
  CHECK(run() == 1);
  CHECK(run() == 2);
  again.begin();
  CHECK(run() == 1);
  again.begin();  // one inside another
  CHECK(run() == 1);
  again.end();
  again.end();
  CHECK(inner.attr("n").toTensor().item<float>() == 2);
}

}  // namespace test_pipeline_buffers
