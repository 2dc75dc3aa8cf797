// What LibTorch's modules list that Python's do not: a tensor that is registered in two places, twice; and undefined
// tensors, its "none", beside others.
#include <ATen/ATen.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include "support/catch.h"
#include "support/sizer_test.h"

#include <brimful/pipeline/pipeline.h>
#include <brimful/pipeline/stage.h>
#include <brimful/sizer/batch_norms.h>
#include <brimful/sizer/grad_scaler.h>
#include <brimful/sizer/map_batches.h>
#include <brimful/sizer/optimizer_bytes.h>
#include <brimful/sizer/verify_split.h>
#include <brimful/step/standing_bytes.h>

#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <tuple>

namespace test_twice_or_undefined {

using namespace brimful;
using namespace brimful::test;

namespace {
constexpr int64_t kWidth = 4;
const c10::Device kCpu(c10::DeviceType::CPU);

/// The first layer is the last one too, and its norm stands in two places.
struct Tied : torch::nn::Module {
  explicit Tied(bool twice) {
    register_module("in", in);
    register_module("mid", mid);
    register_module("norm", norm);
    if (twice) {
      register_module("out", in);
      register_module("norm again", norm);
    }
    to(at::kDouble);
    const at::NoGradGuard guard;
    double salt = 1;
    for (auto* linear : {&in, &mid}) {
      for (auto& parameter : (*linear)->parameters()) {
        parameter.copy_(filled(parameter.sizes(), salt++, at::kDouble));
      }
    }
    norm->eval();
  }
  at::Tensor forward(const at::Tensor& x) { return in(at::tanh(mid(at::tanh(norm(in(x)))))); }
  torch::nn::Linear in{kWidth, kWidth};
  torch::nn::Linear mid{kWidth, kWidth};
  torch::nn::BatchNorm1d norm{kWidth};
};

at::Tensor rows(int rank, int64_t count = 6) {
  return filled({count, kWidth}, 3 + rank, at::kDouble);
}

std::vector<at::Tensor> gradients_of(const Tied& net) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter :
       {net.in->weight, net.in->bias, net.mid->weight, net.mid->bias, net.norm->weight}) {
    gradients.push_back(parameter.grad().clone());
  }
  return gradients;
}

double norm_of(const Tied& net) {
  double squares = 0;
  for (const auto& parameter : net.parameters()) {
    squares += parameter.grad().square().sum().item<double>();
  }
  return std::sqrt(squares);
}

/// Returns its second tensor as LibTorch's MultiheadAttention does without weights: undefined.
struct Attention : torch::nn::Module {
  Attention() { register_module("inner", inner); }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    return inner->forward(x, x, x, {}, false);
  }
  torch::nn::MultiheadAttention inner{torch::nn::MultiheadAttentionOptions(8, 2)};
};

template <typename Output>
struct Returning : torch::nn::Module {
  explicit Returning(std::function<Output(const at::Tensor&)> make_output)
      : make(std::move(make_output)) {
    register_module("linear", linear);
  }
  Output forward(const at::Tensor& x) { return make(linear(x)); }
  torch::nn::Linear linear{kWidth, kWidth};
  std::function<Output(const at::Tensor&)> make;
};

template <typename Output, typename Pick>
void train(const std::string& name, std::function<Output(const at::Tensor&)> make,
           const Pick& pick) {
  const Watchdog watchdog(name);
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    const auto net = std::make_shared<Returning<Output>>(make);
    DistributedDataParallel<Returning<Output>> model(net, group);
    const auto x = filled({6, kWidth}, rank);
    pick(model(x)).square().mean().backward();
    checks.expect(net->linear->weight.grad().defined(), name + " in a plain loop");
    net->zero_grad();
    BatchSizer sizer(model);
    sizer.step(x, [&](const at::Tensor& piece) { return pick(model(piece)).square().mean(); });
    checks.expect(net->linear->weight.grad().defined(), name + " in a step");
  });
  REQUIRE(checks.failures() == std::vector<std::string>{});
}
}  // namespace

TEST_CASE("A parameter that is registered twice has its whole gradient and counts once",
          "[sizer]") {
  const Quiet quiet;
  const int world_size = GENERATE(1, 2, 3);
  const bool in_step = GENERATE(false, true);
  CAPTURE(world_size, in_step);
  const Watchdog watchdog("tied weights");
  const auto reference = std::make_shared<Tied>(false);
  for (int rank = 0; rank < world_size; ++rank) {
    (reference->forward(rows(rank)).square().mean() / world_size).backward();
  }
  Checks checks;
  run_ranks({world_size}, [&](int rank, const Group& group) {
    const auto net = std::make_shared<Tied>(true);
    DistributedDataParallel<Tied> model(net, group);
    const auto loss = [&](const at::Tensor& piece) { return model(piece).square().mean(); };
    for (int step = 0; step < 3; ++step) {  // the plan changes after the first
      net->zero_grad();
      if (in_step) {
        BatchSizerOptions options;
        options.pieces = 2;
        BatchSizer(model, options).step(rows(rank), loss);
      } else {
        loss(rows(rank)).backward();
      }
      const auto found = gradients_of(*net);
      const auto right = gradients_of(*reference);
      for (size_t i = 0; i < right.size(); ++i) {
        checks.expect(at::allclose(found[i], right[i], 1e-10, 1e-12),
                      "gradient " + std::to_string(i));
      }
      const auto norm = model.reducer()->clip_grad_norm(1e9).item<double>();
      checks.expect(norm == Approx(norm_of(*reference)), "norm");
    }
    checks.expect(model.reducer()->parameters().size() == reference->parameters().size(), "once");
    checks.expect(model.reducer()->names().size() == reference->parameters().size(), "names");
  });
  REQUIRE(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A tensor that is listed twice counts once wherever a list is given", "[sizer]") {
  const auto parameter = at::ones({kWidth}).requires_grad_();
  const auto fill = [&] { parameter.mutable_grad() = at::full({kWidth}, 8.0); };
  const std::vector<at::Tensor> twice{parameter, parameter};
  const int64_t bytes = kWidth * 4;

  SECTION("by what stands in memory") {
    const auto buffer = at::ones({kWidth});
    const auto standing =
        standing_bytes({parameter, parameter, at::Tensor()}, {buffer, buffer, at::Tensor()}, kCpu);
    CHECK(standing.parameters == bytes);
    CHECK(standing.buffers == bytes);
  }
  SECTION("by the forecast of an optimizer's step") {
    torch::optim::Adam once({parameter});
    torch::optim::Adam tied(twice);
    CHECK(next_step_bytes(tied) == next_step_bytes(once));
  }
  SECTION("by a scaler") {
    GradScalerOptions options;
    options.init_scale = 4;
    GradScaler scaler(options);
    torch::optim::SGD optimizer(twice, torch::optim::SGDOptions(0));
    scaler.scale(at::ones({}));
    fill();
    scaler.unscale(optimizer);
    CHECK(parameter.grad()[0].item<double>() == 2);
  }
  SECTION("by a step without a reducer") {
    BatchSizer sizer(StepGroup({}, twice), Transaction({}, {kCpu}), {});
    sizer.step(at::ones({4, kWidth}),
               [&](const at::Tensor& piece) { return (piece * parameter).sum(1).mean(); });
    CHECK(parameter.grad()[0].item<double>() == Approx(1));
  }
  SECTION("by a pipeline") {
    const auto stage =
        pipeline::make_stage([&](const at::Tensor& x) { return x * parameter; }, twice, {}, "tied");
    pipeline::Pipeline pipe({stage}, {});
    CHECK_THAT(pipe.to_string(), Catch::Contains("4 parameters"));
  }
  SECTION("by the BatchNorms that a model has") {
    Tied net(true);
    CHECK(batch_norms_of(net).size() == 1);
  }
  SECTION("by a comparison") {
    Tied net(true);
    const auto check = verify_split(
        net, rows(0), [&](const at::Tensor& piece) { return net.forward(piece).square().mean(); });
    CHECK(check.equal);
  }
}

TEST_CASE("A module may return undefined tensors beside others", "[sizer]") {
  const Quiet quiet;
  using Tensors = std::vector<at::Tensor>;
  using Pair = std::pair<at::Tensor, at::Tensor>;
  using Optional = std::optional<at::Tensor>;
  using Nested = std::vector<std::tuple<at::Tensor, at::Tensor>>;
  train<std::tuple<at::Tensor, at::Tensor>>(
      "tuple", [](const at::Tensor& y) { return std::make_tuple(y, at::Tensor()); },
      [](const auto& output) { return std::get<0>(output); });
  train<Pair>(
      "pair",
      [](const at::Tensor& y) {
        return Pair{at::Tensor(), y};
      },
      [](const Pair& output) { return output.second; });
  train<Tensors>(
      "vector",
      [](const at::Tensor& y) {
        return Tensors{at::Tensor(), y};
      },
      [](const Tensors& output) { return output[1]; });
  train<Nested>(
      "nested",
      [](const at::Tensor& y) {
        return Nested{{at::Tensor(), at::Tensor()}, {at::Tensor(), y}};
      },
      [](const Nested& output) { return std::get<1>(output[1]); });
  train<std::tuple<Optional, at::Tensor>>(
      "optional", [](const at::Tensor& y) { return std::make_tuple(Optional(), y); },
      [](const auto& output) { return std::get<1>(output); });
  run_ranks({2}, [](int rank, const Group& group) {
    DistributedDataParallel<Attention> model(std::make_shared<Attention>(), group);
    std::get<0>(model(filled({3, 4, 8}, rank))).sum().backward();
  });
}

TEST_CASE("A batch may hold undefined tensors", "[sizer]") {
  const Quiet quiet;
  using Batch = std::tuple<at::Tensor, at::Tensor, std::vector<at::Tensor>,
                           std::map<std::string, at::Tensor>, std::optional<at::Tensor>>;
  const auto x = filled({6, kWidth}, 1);
  const Batch batch{x, {}, {at::Tensor(), x}, {{"none", at::Tensor()}}, std::nullopt};
  const auto net = std::make_shared<torch::nn::LinearImpl>(kWidth, kWidth);
  const auto loss = [&](const Batch& piece) {
    CHECK_FALSE(std::get<1>(piece).defined());
    return net->forward(std::get<0>(piece)).square().mean();
  };
  run_ranks({1}, [&](int, const Group& group) {
    DistributedDataParallel<torch::nn::LinearImpl> model(net, group);
    BatchSizerOptions options;
    options.pieces = 2;
    options.predict = true;
    BatchSizer sizer(model, options);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      sizer.step(batch, loss);
    }
    net->zero_grad();
    sizer.plan(batch, loss);
  });
  CHECK(verify_split(*net, batch, loss).equal);
}

TEST_CASE("map_batches takes undefined tensors for none, alike in all pieces", "[sizer][map]") {
  const Quiet quiet;
  const auto x = filled({6, kWidth}, 1);
  MapOptions options;
  options.pieces = GENERATE(1, 3);
  using Two = std::tuple<at::Tensor, at::Tensor>;
  const auto [none, twice] = map_batches(
      [](const at::Tensor& piece) {
        return Two{at::Tensor(), piece * 2};
      },
      x, options);
  CHECK_FALSE(none.defined());
  CHECK(at::equal(twice, x * 2));
  using Perhaps = std::pair<at::Tensor, std::optional<at::Tensor>>;
  const auto perhaps = map_batches(
      [](const at::Tensor& piece) {
        return Perhaps{piece * 2, std::nullopt};
      },
      x, options);
  CHECK_FALSE(perhaps.second.has_value());
  CHECK_THROWS_AS(map_batches([](const at::Tensor&) { return Two{}; }, x, options), c10::TypeError);
  if (options.pieces > 1) {
    int call = 0;
    CHECK_THROWS_WITH(map_batches(
                          [&](const at::Tensor& piece) {
                            return Two{piece, call++ == 0 ? at::Tensor() : piece};
                          },
                          x, options),
                      Catch::Contains("another structure"));
  }
}

TEST_CASE("Microbatches agree in what is undefined", "[sizer]") {
  const auto x = filled({6, kWidth}, 1);
  const auto joined =
      pipeline::joined({{{x, at::Tensor()}, nullptr}, {{x, at::Tensor()}, nullptr}});
  CHECK(joined.tensors[0].size(0) == 12);
  CHECK_FALSE(joined.tensors[1].defined());
  CHECK_THROWS_WITH(pipeline::joined({{{x, at::Tensor()}, nullptr}, {{x, x}, nullptr}}),
                    Catch::Contains("different structure"));
}

}  // namespace test_twice_or_undefined
