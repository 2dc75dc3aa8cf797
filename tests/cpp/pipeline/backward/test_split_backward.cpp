#include <brimful/memory/fault.h>
#include <brimful/memory/stats.h>
#include <brimful/pipeline/split_backward.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "pipeline/split_stages.h"
#include "support/catch.h"
#include "support/checks.h"
#include "support/trainer.h"
#include "support/watchdog.h"

#include <brimful/launch/run_ranks.h>

#include <thread>

namespace test_split_backward {

using namespace brimful::test;
using brimful::pipeline::backward_full;
using brimful::pipeline::backward_input;
using brimful::pipeline::InputBackward;

namespace {

const c10::Device kCpu(c10::DeviceType::CPU);

int64_t used_bytes() {
  return brimful::memory::stats(kCpu).used_bytes;
}

struct Gradients {
  Tensors inputs;
  Tensors parameters;
};

/// By torch's own backward.
Gradients whole(const SplitStage& stage) {
  stage.empty_gradients();
  const auto inputs = stage.cut();
  const auto outputs = stage.forward(inputs);
  const auto gradients = gradients_for(outputs);
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].requires_grad()) {
      outputs[i].backward(gradients[i], /*retain_graph=*/true);
    }
  }
  Gradients result;
  for (const auto& input : inputs) {
    result.inputs.push_back(input.grad());
  }
  result.parameters = stage.gradients();
  stage.empty_gradients();
  return result;
}

/// The same sums in another order: of several outputs, torch's backward above goes through one at a time.
bool close(const Tensors& a, const Tensors& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.defined() == y.defined() && (!x.defined() || at::allclose(x, y, 1e-5, 1e-6));
  });
}

Gradients in_two(const SplitStage& stage) {
  stage.empty_gradients();
  const auto inputs = stage.cut();
  const auto outputs = stage.forward(inputs);
  auto result = backward_input(outputs, gradients_for(outputs), inputs);
  CHECK(result.split);
  for (const auto& parameter : stage.parameters) {
    CHECK_FALSE(parameter.grad().defined());
  }
  result.weight_work.run();
  CHECK(result.weight_work.empty());
  return {result.input_gradients, stage.gradients()};
}

Gradients in_one(const SplitStage& stage) {
  stage.empty_gradients();
  const auto inputs = stage.cut();
  const auto outputs = stage.forward(inputs);
  auto gradients = backward_full(outputs, gradients_for(outputs), inputs);
  return {gradients, stage.gradients()};
}

/// y = x * w * 2; counts its backwards.
struct Doubled : torch::autograd::Function<Doubled> {
  static inline int backwards = 0;
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x * w * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    ++backwards;
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1] * 2, (gradients[0] * saved[0] * 2).sum(0)};
  }
};

}  // namespace

TEST_CASE("A backward in two pieces gives the bits of one in one piece", "[pipeline]") {
  for (const auto& stage : split_stages()) {
    INFO(stage.name);
    const auto torchs = whole(stage);
    const auto one = in_one(stage);
    const auto two = in_two(stage);
    CHECK(close(one.inputs, torchs.inputs));
    CHECK(close(one.parameters, torchs.parameters));
    CHECK(same_bits(two.inputs, one.inputs));
    CHECK(same_bits(two.parameters, one.parameters));
  }
}

TEST_CASE("The backward for the inputs frees what the one for the parameters does not need",
          "[pipeline][memory]") {
  brimful::memory::install();
  constexpr int64_t kRows = 64;
  constexpr int64_t kWidth = 32;
  constexpr int64_t kTensor = kRows * kWidth * 4;
  constexpr int kLayers = 4;
  const auto stage = mlp_stage(kRows, kWidth, kLayers);
  const auto inputs = stage.cut();
  const auto before = used_bytes();
  auto outputs = stage.forward(inputs);
  const auto forward = used_bytes() - before;
  // The inputs of all layers but the first, whose is the stage's own, and of all activations; and the output.
  REQUIRE(forward == 2 * kLayers * kTensor);
  auto gradient = at::ones_like(outputs[0]);
  const brimful::memory::PeakScope peak(kCpu);
  auto result = backward_input(outputs, {gradient}, inputs);
  const auto peak_bytes = peak.peak_bytes() - before;
  gradient = at::Tensor();
  outputs.clear();
  result.input_gradients.clear();
  CHECK(result.weight_work.bytes() == kLayers * kTensor);
  // What the layers take, and the gradients of what they give.
  CHECK(used_bytes() - before == (kLayers - 1 + kLayers) * kTensor);
  // Node by node: an activation's input is gone when the gradient before the next one is made.
  CHECK(peak_bytes <= forward + 4 * kTensor);
  result.weight_work.run();
  stage.empty_gradients();
  CHECK(used_bytes() == before);
}

TEST_CASE("A backward in two pieces that is dropped leaves nothing behind", "[pipeline][memory]") {
  brimful::memory::install();
  const auto stage = transformer_stage();
  const auto before = used_bytes();
  {
    const auto inputs = stage.cut();
    const auto outputs = stage.forward(inputs);
    const auto result = backward_input(outputs, gradients_for(outputs), inputs);
    CHECK(result.weight_work.bytes() > 0);
  }
  CHECK(used_bytes() == before);
}

TEST_CASE("An allocation that fails anywhere in a split backward leaves nothing behind",
          "[pipeline][memory][faults]") {
  brimful::memory::install();
  const Watchdog watchdog("faults in a split backward", std::chrono::seconds(60));
  for (const auto& stage : split_stages()) {
    INFO(stage.name);
    const auto expected = in_one(stage);
    for (const bool in_weight : {false, true}) {
      bool fired = true;
      for (int64_t index = 0; fired; ++index) {
        CAPTURE(in_weight, index);
        stage.empty_gradients();
        const auto before = used_bytes();
        {
          const auto inputs = stage.cut();
          const auto outputs = stage.forward(inputs);
          const auto gradients = gradients_for(outputs);
          InputBackward result;
          std::optional<brimful::memory::FaultAt> fault;
          bool threw = false;
          try {
            if (!in_weight) {
              fault.emplace(index);
            }
            result = backward_input(outputs, gradients, inputs);
            if (in_weight) {
              fault.emplace(index);
            }
            result.weight_work.run();
          } catch (const c10::OutOfMemoryError&) {
            threw = true;
          }
          fired = fault->fired();
          fault.reset();
          CHECK(threw == fired);
          CHECK(result.weight_work.empty());
        }
        stage.empty_gradients();
        CHECK(used_bytes() == before);
        const auto again = in_two(stage);
        CHECK(same_bits(again.inputs, expected.inputs));
        CHECK(same_bits(again.parameters, expected.parameters));
        stage.empty_gradients();
      }
    }
  }
}

TEST_CASE("Hooks run once in a split backward, and what they return counts", "[pipeline]") {
  const auto run = [](bool split) {
    const auto stage = mlp_stage();
    auto x = stage.cut();
    int on_input = 0;
    int on_hidden = 0;
    int on_parameter = 0;
    x[0].register_hook([&](const at::Tensor& g) { return ++on_input, g * 2; });
    const auto hidden = at::linear(x[0], stage.parameters[0], stage.parameters[1]);
    hidden.register_hook([&](const at::Tensor& g) { return ++on_hidden, g * 3; });
    hidden.retain_grad();
    stage.parameters[0].register_hook([&](const at::Tensor& g) { return ++on_parameter, g * 5; });
    const Tensors outputs{at::gelu(hidden).matmul(stage.parameters[2])};
    Tensors result;
    if (split) {
      auto two = backward_input(outputs, gradients_for(outputs), x);
      CHECK((on_input == 1 && on_hidden == 1 && on_parameter == 0));
      two.weight_work.run();
      result = two.input_gradients;
    } else {
      result = backward_full(outputs, gradients_for(outputs), x);
    }
    CHECK((on_input == 1 && on_hidden == 1 && on_parameter == 1));
    result.push_back(hidden.grad());
    for (const auto& gradient : stage.gradients()) {
      result.push_back(gradient);
    }
    return result;
  };
  CHECK(same_bits(run(true), run(false)));
}

TEST_CASE("A function of the user's own runs once in a split backward", "[pipeline]") {
  const auto weight = leaf(filled({4}, 1));
  const auto matrix = leaf(filled({4, 4}, 2));
  const auto run = [&](bool linear) {
    weight.mutable_grad() = at::Tensor();
    matrix.mutable_grad() = at::Tensor();
    const Tensors x{leaf(filled({3, 4}, 3))};
    auto y = Doubled::apply(x[0], weight);
    if (linear) {
      y = y.matmul(matrix);
    }
    Doubled::backwards = 0;
    auto result = backward_input({y}, gradients_for({y}), x);
    CHECK(Doubled::backwards == 1);
    CHECK(result.split == linear);
    CHECK_THAT(result.note, Catch::Contains("Doubled") && Catch::Contains("split"));
    CHECK(weight.grad().defined() == !linear);
    result.weight_work.run();
    CHECK(Doubled::backwards == 1);
    const auto gradient =
        linear ? gradients_for({y})[0].matmul(matrix.detach().t()) : gradients_for({y})[0];
    CHECK(same_bits(result.input_gradients[0], gradient * weight.detach() * 2));
    CHECK(same_bits(weight.grad(), (gradient * x[0].detach() * 2).sum(0)));
    CHECK(matrix.grad().defined() == linear);
  };
  run(true);
  run(false);
}

TEST_CASE("Wrong arguments of a split backward are refused by name", "[pipeline]") {
  const auto x = leaf(filled({3, 4}, 1));
  const auto y = x * 2;
  using Catch::Contains;
  CHECK_THROWS_WITH(backward_input({y}, {y, y}, {x}), Contains("outputs: 1, gradients: 2"));
  CHECK_THROWS_WITH(backward_input({y.sin()}, {y}, {y}), Contains("input: 0, from: MulBackward"));
  CHECK_THROWS_WITH(backward_full({y}, {}, {x}), Contains("output: 0, shape: [3, 4]"));
  CHECK_THROWS_AS(backward_full({y}, {}, {x}), c10::ValueError);
  CHECK_THROWS_AS(backward_input({y}, {filled({2}, 1)}, {x}), c10::Error);
}

TEST_CASE("Gradients that inputs have from elsewhere stay as they are", "[pipeline]") {
  const auto x = leaf(filled({3, 4}, 1));
  const auto mine = filled({3, 4}, 2);
  x.mutable_grad() = mine;
  const auto y = x.sin();
  const auto gradients = backward_full({y}, gradients_for({y}), {x, x});
  CHECK(x.grad().is_same(mine));
  CHECK(same_bits(gradients[0], gradients[1]));
  CHECK_FALSE(gradients[0].is_same(mine));
  const auto z = x.sin();
  CHECK(same_bits(backward_input({z}, gradients_for({z}), {x, x}).input_gradients, gradients));
  CHECK(x.grad().is_same(mine));
}

TEST_CASE("A graph of a hundred thousand nodes is split", "[pipeline]") {
  const auto w = leaf(filled({2}, 1));
  const Tensors x{leaf(filled({2}, 2))};
  auto y = x[0] * w;
  for (int i = 0; i < 100'000; ++i) {
    y = y + 1e-6;
  }
  auto result = backward_input({y * w}, {at::ones({2})}, x);
  y = at::Tensor();
  result.weight_work.run();
  CHECK(at::allclose(result.input_gradients[0], w.detach() * w.detach()));
  CHECK(w.grad().defined());
}

TEST_CASE("Threads split the backwards of one model's microbatches at once", "[pipeline]") {
  const Watchdog watchdog("threads that split backwards");
  const auto stage = mlp_stage();
  constexpr int kThreads = 4;
  constexpr int kRounds = 20;
  in_two(stage);
  const auto one = stage.gradients();
  stage.empty_gradients();
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        const auto inputs = stage.cut();
        const auto outputs = stage.forward(inputs);
        auto result = backward_input(outputs, gradients_for(outputs), inputs);
        result.weight_work.run();
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (size_t i = 0; i < one.size(); ++i) {
    CHECK(at::allclose(stage.parameters[i].grad(), one[i] * (kThreads * kRounds), 1e-4, 1e-5));
  }
}

TEST_CASE("The reducer's buckets are launched in the backward for the parameters",
          "[pipeline][reducer]") {
  constexpr int kRanks = 2;
  constexpr int kMicrobatches = 3;
  const Watchdog watchdog("a reducer under a split backward");
  Checks checks;
  brimful::run_ranks({kRanks}, [&](int rank, const Group& group) {
    const auto stage = mlp_stage();
    const auto input_of = [](int of_rank, int step, int microbatch) {
      return filled({5, 8}, of_rank + 0.1 * microbatch + 7 * step);
    };
    const auto reducer = brimful::Reducer::create(stage.parameters, {}, group, tiny_buckets());
    for (int step = 0; step < 3; ++step) {
      Tensors expected;
      for (const auto& parameter : stage.parameters) {
        expected.push_back(at::zeros_like(parameter));
      }
      const auto alone = mlp_stage();
      for (int other = 0; other < kRanks; ++other) {
        for (int microbatch = 0; microbatch < kMicrobatches; ++microbatch) {
          const Tensors x{leaf(input_of(other, step, microbatch))};
          const auto y = alone.forward(x);
          backward_full(y, gradients_for(y), x);
        }
      }
      stage.empty_gradients();
      std::vector<InputBackward> left;
      reducer->loop().prepare_forward();
      for (int microbatch = 0; microbatch < kMicrobatches; ++microbatch) {
        const Tensors x{leaf(input_of(rank, step, microbatch))};
        const auto y = stage.forward(x);
        reducer->loop().watch(y[0]);
        left.push_back(backward_input(y, gradients_for(y), x));
      }
      reducer->loop().forward_done();
      const auto launches = reducer->counters().launches;
      for (int microbatch = 0; microbatch < kMicrobatches; ++microbatch) {
        reducer->loop().set_sync(microbatch == kMicrobatches - 1);
        checks.expect(reducer->counters().launches == launches, "launched before the last W");
        left[microbatch].weight_work.run();
      }
      checks.expect(reducer->counters().launches >= launches + reducer->buckets(), "not launched");
      for (size_t i = 0; i < expected.size(); ++i) {
        checks.expect(at::allclose(stage.parameters[i].grad(), alone.parameters[i].grad() / kRanks,
                                   1e-5, 1e-6),
                      "parameter " + std::to_string(i) + " in step " + std::to_string(step));
      }
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Of scales and shifts the sums are kept, not what they are made of",
          "[pipeline][memory]") {
  brimful::memory::install();
  const auto scale = leaf(filled({32}, 1));
  const auto shift = leaf(filled({32}, 2));
  const Tensors x{leaf(filled({64, 32}, 3))};
  const auto gradient = filled({64, 32}, 4);
  const auto before = used_bytes();
  const auto stage = [&] { return at::layer_norm(x[0].sin(), {32}, scale, shift) + shift; };
  auto result = backward_input({stage()}, {gradient}, x);
  result.input_gradients.clear();
  CHECK(result.split);
  CHECK(result.note.empty());
  CHECK_FALSE(scale.grad().defined());
  CHECK(used_bytes() - before == 3 * 32 * 4);
  CHECK(result.weight_work.bytes() == 3 * 32 * 4);
  result.weight_work.run();
  const Tensors split{scale.grad(), shift.grad()};
  scale.mutable_grad() = shift.mutable_grad() = at::Tensor();
  backward_full({stage()}, {gradient}, x);
  CHECK(same_bits(split, {scale.grad(), shift.grad()}));
}

}  // namespace test_split_backward
