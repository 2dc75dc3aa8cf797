// What checkpoint() holds, what it refuses, what a failure leaves, and steps of several ranks with it.
#include <ATen/ATen.h>
#include <brimful/ladder/checkpoint_sequential.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include "support/gpu.h"
#include "support/sizer_test.h"

#include <brimful/memory/fault.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace test_checkpoint_behaviour {

using namespace brimful;
using namespace brimful::test;
namespace nn = torch::nn;
using at::Tensor;
using Tensors = std::vector<Tensor>;

namespace {
const c10::Device kCpu(c10::DeviceType::CPU);

Tensor generator_now(c10::Device device = kCpu) {
  return at::globalContext().defaultGenerator(device).get_state();
}

Tensor leaf(at::IntArrayRef sizes, double salt) {
  return filled(sizes, salt).set_requires_grad(true);
}

nn::Sequential block(bool draws = true) {
  return nn::Sequential(nn::Linear(4, 6), nn::BatchNorm1d(6), nn::Dropout(draws ? 0.4 : 0.0),
                        nn::Tanh(), nn::Linear(6, 4));
}

Tensors gradients_of(const nn::Sequential& model) {
  Tensors found;
  for (const auto& parameter : model->parameters()) {
    found.push_back(parameter.grad());
  }
  return found;
}

nn::Sequential deep(int layers) {
  nn::Sequential model;
  for (int i = 0; i < layers; ++i) {
    model->push_back(nn::Linear(64, 64));
    model->push_back(nn::Tanh());
  }
  return model;
}

struct ForwardBytes {
  int64_t held = 0;
  int64_t peak = 0;
};

ForwardBytes forward_bytes(const std::function<Tensor()>& forward) {
  const auto before = memory::stats(kCpu).used_bytes;
  const memory::PeakScope scope(kCpu);
  const auto y = forward();
  return {memory::stats(kCpu).used_bytes - before, scope.peak_bytes() - before};
}

/// The loss, whose backward runs the function again.
struct Wrong {
  const char* name;
  const char* text;
  std::function<void()> run;
};

/// Something else each time that it runs.
Tensor changing(const std::function<Tensor(int, const Tensor&)>& fn) {
  int runs = 0;
  const auto y = checkpoint([&runs, fn](Tensor a) { return fn(runs++, a); }, leaf({3, 4}, 1) * 2);
  y.sum().backward();
  return y;
}

const std::vector<Wrong>& wrongs() {
  static const std::vector<Wrong> all{
      {"an input that was changed", "(tensor: input 0, shape: [3, 4])",
       [] {
         const auto x = leaf({3, 4}, 1) * 2;
         const auto y = checkpoint([](Tensor a) { return a.sin(); }, x);
         x.detach().add_(1);
         y.sum().backward();
       }},
      {"a parameter that was changed", "(tensor: 0.weight, shape: [6, 4])",
       [] {
         auto model = block();
         const auto y = checkpoint(model, leaf({3, 4}, 1));
         model->parameters()[0].detach().add_(1);
         y.sum().backward();
       }},
      {"a captured tensor that was changed", "(tensor: one that the function captures, shape: [4])",
       [] {
         const auto scale = filled({4}, 2);
         const auto y = checkpoint([=](Tensor a) { return a * scale; }, leaf({3, 4}, 1));
         scale.add_(1);
         y.sum().backward();
       }},
      {"other sizes", "(output: 0, first: Float [3, 4], now: Float [3, 2])",
       [] {
         changing(
             [](int run, const Tensor& a) { return run == 0 ? a.sin() : a.narrow(1, 0, 2).sin(); });
       }},
      {"no gradient", "now: Float [3, 4] without gradient",
       [] {
         changing([](int run, const Tensor& a) { return run == 0 ? a.sin() : a.detach().sin(); });
       }},
      {"another number of outputs", "(first: 1, now: 2)",
       [] {
         int runs = 0;
         const auto y = checkpoint(
             [&](Tensor a) {
               return runs++ == 0 ? Tensors{a.sin()} : Tensors{a.sin(), a.cos()};
             },
             leaf({3, 4}, 1));
         y[0].sum().backward();
       }},
      {"other parameters", "(with gradients, first: 2, now: 2)",
       [] {
         const auto w = leaf({4}, 1);
         const auto v = leaf({4}, 2);
         changing([=](int run, const Tensor& a) { return a * (run == 0 ? w : v); });
       }},
      {"a tensor that was not returned", "made inside of a checkpoint",
       [] {
         Tensor inside;
         const auto fn = [&](Tensor a) {
           inside = a.sin();
           return inside * 2;
         };
         const auto y = checkpoint(fn, leaf({3, 4}, 1));
         (y + inside).sum().backward();
       }},
      {"segments without a layer", "(segments: 6, layers: 5)",
       [] {
         checkpoint_sequential(block(), 6, leaf({3, 4}, 1));
       }},
      {"no segments", "(segments: 0, layers: 5)",
       [] {
         checkpoint_sequential(block(), 0, leaf({3, 4}, 1));
       }},
  };
  return all;
}

/// A Net whose layers are recomputed.
struct CheckpointedNet : Net {
  using Net::Net;
  Tensor forward(const Tensor& x) {
    return checkpoint([this](const Tensor& a) { return Net::forward(a); }, x);
  }
};

template <typename Module>
Tensors plain_loop(const Group& group, int rank) {
  DistributedDataParallel<Module> model(std::make_shared<Module>(), group, tiny_buckets());
  Tensors found;
  for (int step = 0; step < 3; ++step) {
    const auto batch = batch_of(rank, step, 5);
    at::mse_loss(model(batch.data), batch.target).backward();
    for (const auto& gradient : model->gradients()) {
      found.push_back(gradient.clone());
    }
    model->update();
  }
  for (const auto& buffer : model->buffers()) {
    found.push_back(buffer.clone());
  }
  return found;
}

/// In the second step rank 0 runs out of memory, and all repeat it in finer pieces.
template <typename Module>
Tensors sizer_loop(const Group& group, int rank) {
  DistributedDataParallel<Module> model(std::make_shared<Module>(), group, tiny_buckets());
  BatchSizer sizer(StepGroup({model.reducer()}, {}), Transaction(model->buffers(), {kCpu}), {});
  Tensors found;
  for (int step = 0; step < 3; ++step) {
    const auto batch = batch_of(rank, step, 8);
    auto& fault = *model->fault;
    fault.at = Fault::At::gradient;
    fault.kind = Fault::Kind::out_of_memory;
    fault.armed = rank == 0 && step == 1;
    const PieceWork work{[&](int64_t begin, int64_t end) {
                           const auto x = slice_rows(batch.data, begin, end);
                           const auto loss =
                               at::mse_loss(model(x), slice_rows(batch.target, begin, end));
                           return PieceLoss{loss, static_cast<double>(end - begin)};
                         },
                         run_backward};
    const auto outcome = sizer.step(input_of(8), work);
    found.push_back(at::scalar_tensor(static_cast<int64_t>(outcome.split.size())));
    for (const auto& gradient : model->gradients()) {
      found.push_back(gradient.clone());
    }
    model->update();
  }
  for (const auto& buffer : model->buffers()) {
    found.push_back(buffer.clone());
  }
  return found;
}
}  // namespace

TEST_CASE("What a checkpointed function saves is not held", "[ladder][checkpoint]") {
  memory::install();
  auto model = deep(16);
  const auto x = leaf({256, 64}, 1);
  const int64_t activation = 256 * 64 * 4;
  const auto plain = forward_bytes([&] { return model->forward(x); });
  const auto found = forward_bytes([&] { return checkpoint(model, x); });
  CHECK(plain.held >= 16 * activation);
  CHECK(found.held == activation);      // the output
  CHECK(found.peak <= 3 * activation);  // and forward holds no more at any time
  model->push_back(nn::Dropout(0.5));
  const auto drawing = forward_bytes([&] { return checkpoint(model, x); });
  CHECK(drawing.held > activation);  // a generator's state
  CHECK(drawing.held < activation + 8192);
  const auto segments = forward_bytes([&] { return checkpoint_sequential(model, 4, x); });
  CHECK(segments.held < plain.held * 2 / 3);
}

TEST_CASE("A shortage at any allocation of a checkpoint leaves all as it was",
          "[ladder][checkpoint]") {
  memory::install();
  const bool unlimited_too = GENERATE(false, true);
  at::manual_seed(3);
  auto model = block();
  const auto buffers = model->buffers();
  const auto x = leaf({5, 4}, 1);
  const auto buffers_before = copies(buffers);
  const auto generator_before = generator_now();
  const auto begin_again = [&] {
    for (size_t i = 0; i < buffers.size(); ++i) {
      buffers[i].copy_(buffers_before[i]);
    }
    auto generator = at::globalContext().defaultGenerator(kCpu);
    generator.set_state(generator_before);
    model->zero_grad();
    x.mutable_grad().reset();
  };
  const auto forward = [&] { return checkpoint(model, x * 2).square().sum(); };
  forward().backward();
  const auto gradients = copies(gradients_of(model));
  const auto x_gradient = x.grad().clone();
  const auto buffers_after = copies(buffers);
  const auto generator_after = generator_now();
  int64_t faults = 0;
  for (bool fired = true; fired; ++faults) {
    begin_again();
    bool in_backward = false;
    fired = false;
    try {
      const memory::FaultAt fault(faults, unlimited_too);
      const auto y = checkpoint(model, x * 2);
      in_backward = true;
      y.square().sum().backward();
      fired = fault.fired();
    } catch (const c10::OutOfMemoryError&) {
      fired = true;
    }
    INFO("allocation " << faults << (in_backward ? " of backward" : " of forward"));
    if (!unlimited_too || in_backward) {  // what could not be copied cannot be put back
      REQUIRE(same_bits(copies(buffers), in_backward ? buffers_after : buffers_before));
      REQUIRE(at::equal(generator_now(), in_backward ? generator_after : generator_before));
    }
    begin_again();
    forward().backward();
    REQUIRE(same_bits(gradients_of(model), gradients));
    REQUIRE(at::equal(x.grad(), x_gradient));
    REQUIRE(same_bits(copies(buffers), buffers_after));
    REQUIRE(at::equal(generator_now(), generator_after));
  }
  CHECK(faults > 30);
}

TEST_CASE("What a checkpoint cannot do has a message", "[ladder][checkpoint]") {
  for (const auto& wrong : wrongs()) {
    INFO(wrong.name);
    const auto caught = catching(wrong.run);
    CHECK(caught.type == Type::value_error);
    CHECK_THAT(caught.text, Catch::Contains(wrong.text));
  }
}

TEST_CASE("A function that changes its input in place is refused, and the input put back",
          "[ladder][checkpoint]") {
  const auto leaf_of_x = leaf({3, 4}, 1);
  const auto x = leaf_of_x * 2;
  const auto before = x.detach().clone();
  const auto caught = catching([&] { checkpoint([](Tensor a) { return a.relu_() * 2; }, x); });
  CHECK(caught.type == Type::value_error);
  CHECK_THAT(caught.text, Catch::Contains("changes in place a tensor from outside"));
  CHECK(at::equal(x, before));
  x.sum().backward();
  CHECK(at::equal(leaf_of_x.grad(), at::full({3, 4}, 2.0)));
}

TEST_CASE("A checkpoint whose graph was freed says so", "[ladder][checkpoint]") {
  const auto y = checkpoint([](Tensor a) { return a.sin(); }, leaf({3, 4}, 1)).sum();
  y.backward();
  CHECK_THAT(catching([&] { y.backward(); }).text, Catch::Contains("retain_graph = true"));
}

TEST_CASE("A function's exceptions go through a checkpoint as they are", "[ladder][checkpoint]") {
  const int when = GENERATE(0, 1);
  int runs = 0;
  const auto caught = catching([&] {
    checkpoint(
        [&](Tensor a) {
          if (runs++ == when) {
            throw std::runtime_error("of the function");
          }
          return a.sin();
        },
        leaf({3, 4}, 1))
        .sum()
        .backward();
  });
  CHECK(caught.type == Type::runtime_error);
  CHECK(caught.text == "of the function");
  CHECK(runs == when + 1);
}

TEST_CASE("Backward leaves generators as it finds them, unless it is not asked to",
          "[ladder][checkpoint]") {
  const bool preserve = GENERATE(true, false);
  const auto y = checkpoint(CheckpointOptions{preserve}, nn::Dropout(0.5), leaf({3, 4}, 1));
  at::rand({3});
  const auto before = generator_now();
  y.sum().backward();
  CHECK(at::equal(generator_now(), before) == preserve);
}

TEST_CASE("Threads run checkpoints beside each other", "[ladder][checkpoint]") {
  constexpr int kThreads = 4;
  Checks checks;
  std::vector<nn::Sequential> models;
  for (int i = 0; i < kThreads; ++i) {
    models.push_back(block(false));
  }
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      auto& model = models[i];
      for (int round = 0; round < 20; ++round) {
        const auto x = leaf({5, 4}, i + round);
        model->forward(x).square().sum().backward();
        const auto expected = copies(gradients_of(model));
        model->zero_grad();
        checkpoint(model, x).square().sum().backward();
        checks.expect(same_bits(gradients_of(model), expected), "thread " + std::to_string(i));
        model->zero_grad();
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Reducer and sizer see a checkpoint's gradients as any others", "[ladder][checkpoint]") {
  const bool sized = GENERATE(false, true);
  const Quiet quiet;
  const Watchdog watchdog("ranks with checkpoints");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    const auto plain = sized ? sizer_loop<Net>(group, rank) : plain_loop<Net>(group, rank);
    const auto found =
        sized ? sizer_loop<CheckpointedNet>(group, rank) : plain_loop<CheckpointedNet>(group, rank);
    checks.expect(plain.size() == found.size() && same_bits(plain, found), "gradients and buffers");
    checks.expect(!sized || rank == 1 || plain[9].item<int64_t>() > 1, "the step is split");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A Sequential runs in segments with the same bits", "[ladder][checkpoint]") {
  const int64_t segments = GENERATE(1, 2, 3, 5);
  auto model = block();
  const auto run = [&](const std::function<Tensor(const Tensor&)>& forward) {
    at::manual_seed(3);
    model->zero_grad();
    const auto x = leaf({5, 4}, 1);
    const auto y = forward(x);
    y.square().sum().backward();
    auto found = copies(gradients_of(model));
    found.insert(found.end(), {y, x.grad(), generator_now()});
    return found;
  };
  const auto plain = run([&](const Tensor& x) { return model->forward(x); });
  CHECK(same_bits(run([&](const Tensor& x) { return checkpoint_sequential(model, segments, x); }),
                  plain));
}

TEST_CASE("A checkpoint on CUDA changes no bit", "[ladder][checkpoint][gpu]") {
  BRIMFUL_NEEDS_GPUS(1);
  const c10::Device device(c10::DeviceType::CUDA, 0);
  const auto run = [&](bool checkpoints) {
    at::manual_seed(3);
    auto model = block();
    model->to(device);
    const auto leaf_of_x = leaf({5, 4}, 1);
    const auto x = leaf_of_x.to(device);
    Tensor y;
    {
      const Autocast autocast(at::kCUDA, at::kHalf);
      y = checkpoints ? checkpoint(model, checkpoint(model, x)) : model->forward(model->forward(x));
    }
    at::rand({3}, at::TensorOptions(device));
    const auto generator = generator_now(device);
    y.square().sum().backward();
    auto found = copies(gradients_of(model));
    found.insert(found.end(), {y, leaf_of_x.grad(),
                               at::scalar_tensor(at::equal(generator, generator_now(device))),
                               generator, generator_now()});
    for (const auto& buffer : model->buffers()) {
      found.push_back(buffer);
    }
    return found;
  };
  const auto plain = run(false);
  const auto found = run(true);
  REQUIRE(plain.size() == found.size());
  for (size_t i = 0; i < plain.size(); ++i) {
    INFO("tensor " << i);
    CHECK(same_bits(plain[i].cpu(), found[i].cpu()));
  }
}

}  // namespace test_checkpoint_behaviour
