#include <ATen/ATen.h>
#include <brimful/sizer/autocast.h>
#include <brimful/sizer/batch_sizer.h>
#include <brimful/sizer/grad_scaler.h>
#include <torch/optim/sgd.h>
#include <cmath>
#include <limits>
#include <string>
#include "support/catch.h"
#include "support/sizer_test.h"

namespace test_grad_scaler {

using namespace brimful;
using namespace brimful::test;

namespace {

at::Tensor parameter(double value = 1) {
  return at::full({3}, value).set_requires_grad(true);
}

torch::optim::SGD sgd(const at::Tensor& parameter) {
  return torch::optim::SGD({parameter}, torch::optim::SGDOptions(0.5));
}

GradScalerOptions small(int64_t growth_interval = 3) {
  GradScalerOptions options;
  options.init_scale = 1024;
  options.growth_interval = growth_interval;
  return options;
}

}  // namespace

// The numbers are those of torch.amp.GradScaler("cpu"), which the Python tests compare in full.
TEST_CASE("the scale grows after finite steps and shrinks after each other one", "[sizer]") {
  GradScaler scaler(small());
  auto weight = parameter();
  auto optimizer = sgd(weight);
  constexpr double kInf = std::numeric_limits<double>::infinity();
  struct Expected {
    double factor;
    double scale;
    double tracker;
  };
  for (const auto& [factor, scale, tracker] : std::vector<Expected>{{1, 1024, 1},
                                                                    {1, 1024, 2},
                                                                    {1, 2048, 0},
                                                                    {1, 2048, 1},
                                                                    {kInf, 1024, 0},
                                                                    {std::nan(""), 512, 0},
                                                                    {1, 512, 1},
                                                                    {1, 512, 2},
                                                                    {1, 1024, 0}}) {
    const auto before = weight.detach().clone();
    optimizer.zero_grad();
    scaler.scale((weight * factor).sum()).backward();
    CHECK(scaler.step(optimizer) == std::isfinite(factor));
    CHECK(at::equal(weight, std::isfinite(factor) ? before - 0.5 : before));
    scaler.update();
    CHECK(scaler.scale_factor() == scale);
    CHECK(scaler.state().at("_growth_tracker") == tracker);
  }
}

TEST_CASE("gradients are unscaled once, and may be changed before the step", "[sizer]") {
  GradScaler scaler;
  auto weight = parameter();
  auto optimizer = sgd(weight);
  scaler.scale(weight.sum()).backward();
  CHECK(weight.grad()[0].item<float>() == 65536);
  scaler.unscale(optimizer);
  CHECK(at::equal(weight.grad(), at::ones({3})));
  weight.mutable_grad().mul_(0.5);
  CHECK(scaler.step(optimizer));
  CHECK(at::equal(weight, at::full({3}, 0.75)));
}

TEST_CASE("one optimizer that meets inf does not stop another, and the scale shrinks", "[sizer]") {
  GradScaler scaler(small());
  auto good = parameter();
  auto bad = parameter();
  auto first = sgd(good);
  auto second = sgd(bad);
  scaler.scale((good + bad / 0).sum()).backward();
  CHECK(scaler.step(first));
  CHECK_FALSE(scaler.step(second));
  scaler.update();
  CHECK(scaler.scale_factor() == 512);
  first.zero_grad();
  second.zero_grad();
  scaler.scale((good / 0 + bad).sum()).backward();
  CHECK(scaler.step(second));
  CHECK_FALSE(scaler.step(first));
  scaler.update();
  CHECK(scaler.scale_factor() == 256);
}

TEST_CASE("values of sparse gradients are unscaled", "[sizer]") {
  GradScaler scaler(small());
  auto weight = at::ones({4, 2}).set_requires_grad(true);
  auto optimizer = sgd(weight);
  const auto rows = at::tensor({1, 3, 1});
  scaler.scale(at::embedding(weight, rows, -1, false, true).sum()).backward();
  REQUIRE(weight.grad().is_sparse());
  scaler.unscale(optimizer);
  CHECK(at::equal(weight.grad().to_dense().select(1, 0), at::tensor({0.F, 2.F, 0.F, 1.F})));
}

TEST_CASE("a scaler that is not enabled passes everything through", "[sizer]") {
  GradScalerOptions options;
  options.enabled = false;
  GradScaler scaler(options);
  auto weight = parameter();
  auto optimizer = sgd(weight);
  const auto loss = (weight / 0).sum();
  CHECK(scaler.scale(loss).is_same(loss));
  loss.backward();
  scaler.unscale(optimizer);
  CHECK(scaler.step(optimizer));
  CHECK(std::isinf(weight[0].item<float>()));
  scaler.update();
  CHECK(scaler.scale_factor() == 1);
  CHECK(scaler.state().empty());
}

TEST_CASE("a state goes on in another scaler, before and after its first use", "[sizer]") {
  GradScaler scaler(small());
  auto weight = parameter();
  auto optimizer = sgd(weight);
  const auto run_step = [&](GradScaler& with) {
    optimizer.zero_grad();
    with.scale(weight.sum()).backward();
    with.step(optimizer);
    with.update();
  };
  run_step(scaler);
  run_step(scaler);
  const auto state = scaler.state();
  GradScaler fresh;
  GradScaler used;
  run_step(used);
  fresh.load_state(state);
  used.load_state(state);
  CHECK(fresh.state() == state);
  for (auto* const other : {&scaler, &fresh, &used}) {
    run_step(*other);
    CHECK(other->scale_factor() == 2048);
    CHECK(other->state().at("_growth_tracker") == 0);
  }
  auto broken = state;
  broken["backoff_factor"] = 2;
  CHECK_THROWS_AS(used.load_state(broken), c10::ValueError);
  broken = state;
  broken.erase("_growth_tracker");
  CHECK_THROWS_WITH(used.load_state(broken), Catch::Contains("(name: _growth_tracker)"));
  CHECK_THROWS_AS(used.load_state({}), c10::ValueError);
  broken = state;
  broken["_growth_tracker"] = -1;
  CHECK_THROWS_WITH(used.load_state(broken), Catch::Contains("(_growth_tracker: -1, "));
  CHECK(used.scale_factor() == 2048);
}

TEST_CASE("calls out of order are errors that say what to do", "[sizer]") {
  GradScaler scaler(small());
  auto weight = parameter();
  auto optimizer = sgd(weight);
  CHECK_THROWS_WITH(scaler.unscale(optimizer), Catch::Contains("unscale() came before the first"));
  CHECK_THROWS_WITH(scaler.step(optimizer), Catch::Contains("step() came before the first"));
  CHECK_THROWS_WITH(scaler.update(), Catch::Contains("update() came before the first"));
  scaler.scale(weight.sum());
  CHECK_THROWS_WITH(scaler.update(), Catch::Contains("before any unscale() or step()"));
  CHECK_THROWS_WITH(scaler.step(optimizer), Catch::Contains("has a gradient (parameters: 1)"));
  scaler.scale(weight.sum()).backward();
  scaler.unscale(optimizer);
  CHECK_THROWS_WITH(scaler.unscale(optimizer), Catch::Contains("called twice"));
  CHECK(scaler.step(optimizer));
  CHECK_THROWS_WITH(scaler.step(optimizer), Catch::Contains("called twice"));
  CHECK_THROWS_WITH(scaler.unscale(optimizer), Catch::Contains("after the optimizer's step()"));
  CHECK(at::equal(weight, at::full({3}, 0.5)));
  scaler.update();
  CHECK(scaler.step(optimizer));
}

TEST_CASE("float16 gradients and factors that make no sense are refused", "[sizer]") {
  GradScaler scaler(small());
  auto weight = at::ones({3}, at::kHalf).set_requires_grad(true);
  auto optimizer = sgd(weight);
  scaler.scale(weight.sum()).backward();
  CHECK_THROWS_AS(scaler.step(optimizer), c10::ValueError);
  CHECK_THROWS_WITH(scaler.unscale(optimizer), Catch::Contains("(shape: [3]); keep the param"));
  CHECK(at::equal(weight, at::ones({3}, at::kHalf)));
  for (const double bad : {0.0, -1.0, std::numeric_limits<double>::infinity()}) {
    CHECK_THROWS_AS(scaler.update(bad), c10::ValueError);
    GradScalerOptions options;
    options.init_scale = bad;
    CHECK_THROWS_AS(GradScaler(options), c10::ValueError);
  }
  CHECK(scaler.scale_factor() == 1024);
  GradScalerOptions options;
  options.growth_factor = 1;
  CHECK_THROWS_WITH(GradScaler(options), Catch::Contains("(growth_factor: 1)"));
  options = {};
  options.backoff_factor = 1;
  CHECK_THROWS_WITH(GradScaler(options), Catch::Contains("(backoff_factor: 1)"));
  options = {};
  options.growth_interval = 0;
  CHECK_THROWS_WITH(GradScaler(options), Catch::Contains("(growth_interval: 0)"));
}

TEST_CASE("a sizer scales the seed: the loss stays, the gradient is the same", "[sizer]") {
  const auto train = [](GradScaler* scaler, bool fault) {
    auto net = std::make_shared<Net>(false);
    const Quiet quiet;
    BatchSizerOptions options;
    options.scaler = scaler;
    BatchSizer sizer(StepGroup({}, net->parameters()), Transaction({}, {}), options);
    const auto batch = batch_of(0, 0, 12);
    std::vector<double> scales;
    const auto forward = [&](int64_t begin, int64_t end) {
      const Autocast guard(at::kCPU);
      net->fault->current_piece = begin == 0 ? 0 : net->fault->current_piece + 1;
      if (scaler != nullptr) {
        scales.push_back(scaler->scale_factor());
        if (net->fault->armed && begin == 0) {
          scaler->update(2);  // a repeated step must not see it
        }
      }
      const auto out = net->forward(slice_rows(batch.data, begin, end));
      return PieceLoss{at::mse_loss(out.to(at::kFloat), slice_rows(batch.target, begin, end)),
                       static_cast<double>(end - begin)};
    };
    net->fault->armed = fault;
    net->fault->at = Fault::At::forward;
    net->fault->piece = 1;
    net->fault->kind = Fault::Kind::out_of_memory;
    const auto outcome =
        sizer.step(input_of(12, std::vector<int64_t>{6, 6}), PieceWork{forward, run_backward});
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.5));
    if (scaler != nullptr) {
      CHECK(scales.back() == 65536);
      CHECK(net->gradients()[0].abs().max().item<float>() > 100);
      scaler->unscale(optimizer);
    }
    return std::make_pair(outcome, copies(net->gradients()));
  };
  const bool fault = GENERATE(false, true);
  GradScaler scaler;
  const auto [plain, expected] = train(nullptr, fault);
  const auto [outcome, gradients] = train(&scaler, fault);
  CHECK(plain.retries == (fault ? 1 : 0));
  CHECK(outcome.retries == plain.retries);
  CHECK(outcome.loss == plain.loss);
  CHECK(expected.front().abs().sum().item<float>() > 0);
  CHECK(same_bits(gradients, expected));  // a power of two changes no bit
}

TEST_CASE("ranks leave out the same step, and another scale is found on all", "[sizer]") {
  const Watchdog watchdog("a scaler on two ranks");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    GradScaler scaler(small());
    BatchSizerOptions options;
    options.scaler = &scaler;
    Trainer trainer(group, std::make_shared<Net>(false), options);
    torch::optim::SGD optimizer(trainer.model->parameters(), torch::optim::SGDOptions(0.5));
    const auto step = [&](const std::optional<Batch>& batch) {
      trainer.fill(batch);
      scaler.unscale(optimizer);
      const bool stepped = scaler.step(optimizer);
      scaler.update();
      optimizer.zero_grad();
      return stepped;
    };
    const auto some = batch_of(rank, 0, 4);
    checks.expect(step(rank == 0 ? std::optional(some) : std::nullopt), "a rank without data");
    auto bad = some;
    bad.data = rank == 1 ? some.data / 0 : some.data;
    checks.expect(!step(bad), "inf on rank 1");
    checks.expect(scaler.scale_factor() == 512, "the scale after inf");
    checks.expect(step(some), "behind it");
    const auto state = scaler.state();
    if (rank == 1) {
      scaler.update(1024);
    }
    const auto caught = catching([&] { trainer.fill(some); });
    checks.expect(caught.type == Type::value_error &&
                      caught.text.find("different scales") != std::string::npos,
                  caught.text);
    scaler.load_state(state);
    checks.expect(step(some), "with the same scale again");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

}  // namespace test_grad_scaler
