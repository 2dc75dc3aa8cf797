// Modules of torch::nn as stages of a C++ program, with BatchNorm, a scaler and autocast.
#include <ATen/ATen.h>
#include <brimful/pipeline/nn_stages.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include "support/catch.h"
#include "support/stages.h"
#include "support/watchdog.h"

#include <brimful/error.h>
#include <brimful/log.h>
#include <brimful/sizer/autocast.h>
#include <brimful/sizer/grad_scaler.h>

namespace test_pipeline_modules {

using namespace brimful;
using namespace brimful::test;
using pipeline::Pipeline;
using pipeline::PipelineOptions;
using pipeline::split_sequential;
using pipeline::Stage;
using pipeline::stage_of;
namespace nn = torch::nn;

namespace {
constexpr int64_t kRows = 12;

/// Of two tensors, and two back.
struct TwinImpl : nn::Module {
  TwinImpl() { register_module("linear", linear); }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& a, const at::Tensor& b) {
    return {linear(a) + b, a * b};
  }
  nn::Linear linear{4, 4};
};
TORCH_MODULE(Twin);

nn::Sequential net(bool with_norms = false) {
  nn::Sequential model;
  for (int i = 0; i < 2; ++i) {
    model->push_back("linear" + std::to_string(i), nn::Linear(4, 4));
    if (with_norms) {
      model->push_back("norm" + std::to_string(i), nn::BatchNorm1d(4));
    } else {
      model->push_back("tanh" + std::to_string(i), nn::Tanh());
    }
  }
  double salt = 1;
  const at::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) {
    parameter.copy_(filled(parameter.sizes(), salt++));
  }
  return model;
}

std::vector<Stage> stages_of(const std::vector<nn::Sequential>& parts) {
  std::vector<Stage> stages;
  for (const auto& part : parts) {
    stages.push_back(stage_of(part));
  }
  return stages;
}

std::vector<at::Tensor> gradients_of(const nn::Sequential& model) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : model->parameters()) {
    gradients.push_back(parameter.grad());
  }
  return gradients;
}

/// What one backward over the whole batch gives.
std::vector<at::Tensor> expected_of(nn::Sequential& model, const at::Tensor& x,
                                    const at::Tensor& y) {
  mse(model->forward(x), y).backward();
  auto gradients = copies(gradients_of(model));
  model->zero_grad();
  return gradients;
}

bool close(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
           double tolerance = 1e-5) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [&](auto& x, auto& y) {
           return x.defined() && at::allclose(x, y, tolerance, tolerance);
         });
}

PipelineOptions in_three(BatchNormPolicy policy = BatchNormPolicy::warn) {
  PipelineOptions options;
  options.microbatches = 3;
  options.batch_norm = policy;
  return options;
}
}  // namespace

TEST_CASE("A torch::nn::Sequential is cut into stages, which train", "[pipeline]") {
  const Watchdog watchdog("modules");
  auto model = net();
  const auto x = filled({kRows, 4}, 3);
  const auto y = filled({kRows, 4}, 4);
  const auto expected = expected_of(model, x, y);
  model[1]->eval();
  const auto parts = split_sequential(model, {1, 3});
  REQUIRE(parts.size() == 2);
  CHECK(parts[1]->named_children().keys() == std::vector<std::string>{"tanh0", "linear1", "tanh1"});
  CHECK(parts[1]->is_training());
  CHECK_FALSE(model[1]->is_training());  // a layer's mode is its own
  Pipeline pipe(stages_of(parts), in_three());
  pipe.step(x, y, mse);
  CHECK(close(gradients_of(model), expected));
  for (const auto& balance : std::vector<std::vector<int64_t>>{{1, 2}, {4, 0}, {5, -1}, {}}) {
    CHECK_THROWS_WITH(split_sequential(model, balance), Catch::Contains("layers: 4"));
  }
}

TEST_CASE("A module of several tensors is a stage", "[pipeline]") {
  const Watchdog watchdog("several tensors");
  Twin twin;
  nn::Linear first(4, 4);
  const auto x = filled({kRows, 4}, 3);
  const auto y = filled({kRows, 4}, 4);
  const auto [a, b] = twin(first(x), x);
  (mse(a, y) + mse(b, y)).backward();
  const auto expected =
      copies({first->weight.grad(), twin->linear->weight.grad(), twin->linear->bias.grad()});
  first->zero_grad();
  twin->zero_grad();
  const auto pair = [&first](const at::Tensor& input) {
    return std::pair<at::Tensor, at::Tensor>(first(input), input);
  };
  Pipeline pipe({pipeline::make_stage(pair, first->parameters()), stage_of(twin, "twin")},
                in_three());
  CHECK(pipe.stages()[1].parameters.size() == 2);
  pipe.step(x, y, [](const std::vector<at::Tensor>& output, const at::Tensor& target) {
    return at::Tensor(mse(output[0], target) + mse(output[1], target));
  });
  CHECK(close({first->weight.grad(), twin->linear->weight.grad(), twin->linear->bias.grad()},
              expected));
}

TEST_CASE("BatchNorms of torch::nn follow the pipeline's policy", "[pipeline]") {
  const Watchdog watchdog("BatchNorm");
  auto model = net(/*with_norms=*/true);
  const auto x = filled({kRows, 4}, 3);
  const auto y = filled({kRows, 4}, 4);
  const auto norm = model[1]->as<nn::BatchNorm1d>();
  auto stages = stages_of(split_sequential(model, {2, 2}));
  CHECK(stages[0].batch_norms.size() == 1);
  CHECK(stages[0].batch_norms[0].name == "norm0");
  CHECK(stage_of(nn::BatchNorm1d(4)).batch_norms.size() == 1);
  CHECK_THROWS_WITH(Pipeline(stages, in_three(BatchNormPolicy::refuse)).step(x, y, mse),
                    Catch::Contains("norm0"));
  CHECK(norm->num_batches_tracked.item<int64_t>() == 0);
  Pipeline(stages, in_three(BatchNormPolicy::rescale)).step(x, y, mse);
  CHECK(norm->num_batches_tracked.item<int64_t>() == 1);
  const auto hidden = model[0]->as<nn::Linear>()->forward(x).detach();
  CHECK(at::allclose(norm->running_mean, hidden.mean(0) * 0.1, 1e-5, 1e-6));
  CHECK(at::allclose(norm->running_var, hidden.var(0) * 0.1 + 0.9, 1e-5, 1e-6));
  CHECK(norm->options.momentum() == 0.1);
  auto uneven = in_three(BatchNormPolicy::rescale);
  uneven.microbatches = 5;
  norm->reset_running_stats();
  Pipeline(stages, uneven).step(x, y, mse);
  CHECK(at::allclose(norm->running_mean, hidden.mean(0) * 0.1, 1e-5, 1e-6));
  CHECK(at::allclose(norm->running_var, hidden.var(0) * 0.1 + 0.9, 1e-5, 1e-6));
  const auto before = norm->running_mean.clone();
  Pipeline(stages, in_three(BatchNormPolicy::freeze)).step(x, y, mse);  // the first piece alone
  const auto first = hidden.slice(0, 0, kRows / 3);
  CHECK(at::allclose(norm->running_mean, before * 0.9 + first.mean(0) * 0.1, 1e-5, 1e-6));
}

TEST_CASE("A scaler scales a pipeline's gradients, and skips the step that overflows",
          "[pipeline]") {
  const Watchdog watchdog("a scaler");
  auto model = net();
  const auto x = filled({kRows, 4}, 3);
  const auto y = filled({kRows, 4}, 4);
  auto expected = expected_of(model, x, y);
  GradScalerOptions of_scaler;
  of_scaler.init_scale = 1024;
  GradScaler scaler(of_scaler);
  auto options = in_three();
  options.scaler = &scaler;
  Pipeline pipe(stages_of(split_sequential(model, {2, 2})), options);
  const auto loss = mse(model->forward(x), y).item<double>();
  CHECK(pipe.step(x, y, mse).loss == Approx(loss));
  for (auto& gradient : expected) {
    gradient = gradient * 1024;
  }
  CHECK(close(gradients_of(model), expected, 1e-3));
  int stepped = 0;
  const auto step = [&] {
    scaler.step_if_finite(&model, model->parameters(), [&] { ++stepped; });
    scaler.update();
    model->zero_grad();
  };
  step();
  CHECK(stepped == 1);
  const auto infinite = [](const at::Tensor& output, const at::Tensor& target) {
    return at::Tensor(mse(output, target) * std::numeric_limits<float>::infinity());
  };
  pipe.step(x, y, infinite);
  step();
  CHECK(stepped == 1);
  CHECK(scaler.scale_factor() == 512);
}

TEST_CASE("Autocast of the caller holds in a pipeline's stages", "[pipeline]") {
  const Watchdog watchdog("autocast");
  auto model = net();
  std::vector<at::ScalarType> seen;
  const auto parts = split_sequential(model, {1, 3});
  auto first = stage_of(parts[0]);
  first.forward = [&seen, inner = first.forward](const pipeline::Value& input) {
    auto output = inner(input);
    seen.push_back(output.tensors[0].scalar_type());
    return output;
  };
  auto head = parts[1];
  const auto last = [&head](const at::Tensor& x) { return head->forward(x).to(at::kFloat); };
  Pipeline pipe({first, pipeline::make_stage(last, head->parameters())}, in_three());
  const auto x = filled({kRows, 4}, 3);
  {
    const Autocast autocast(c10::DeviceType::CPU);
    pipe.step(x, x, mse);
  }
  CHECK(seen == std::vector<at::ScalarType>(3, at::kBFloat16));
  seen.clear();
  pipe.step(x, x, mse);
  CHECK(seen == std::vector<at::ScalarType>(3, at::kFloat));
}

}  // namespace test_pipeline_modules
