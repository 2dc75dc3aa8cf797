// A row that does not fit trains in C++, too: parts that the program names are recomputed, with the same bits.
#include <ATen/CPUGeneratorImpl.h>
#include <brimful/ladder/recomputable.h>
#include <brimful/memory/fault.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include "support/catch.h"
#include "support/gpu.h"
#include "support/sizer_test.h"

#include "ladder/part_figures.h"
#include "ladder/plan_peak.h"

namespace test_recomputable {

using namespace brimful;
using namespace brimful::test;
namespace nn = torch::nn;

namespace {
const c10::Device kCpu(c10::kCPU);
constexpr int64_t kWidth = 16;
constexpr int64_t kTokens = 256;

int64_t used() {
  return memory::stats(kCpu).used_bytes;
}

/// Blocks of different size, and a head that is no part.
struct Model {
  explicit Model(int64_t count = 4) {
    for (int64_t i = 0; i < count; ++i) {
      const auto inner = 64 * (1 + i % 2);
      nn::Sequential block(nn::Linear(kWidth, inner), nn::GELU(), nn::Dropout(0.2),
                           nn::LayerNorm(nn::LayerNormOptions({inner})), nn::Linear(inner, kWidth));
      add(*block);
      blocks.push_back(block);
    }
    norm = nn::BatchNorm1d(kWidth);
    add(*norm);
  }

  void add(const nn::Module& module) {
    for (auto& parameter : module.parameters()) {
      const at::NoGradGuard no_grad;
      parameter.copy_(filled(parameter.sizes(), 1.0 + static_cast<double>(parameters.size())));
      parameters.push_back(parameter);
    }
    for (const auto& buffer : module.buffers()) {
      buffers.push_back(buffer);
    }
  }

  at::Tensor loss(at::Tensor x) {
    x = x.flatten(0, 1);
    for (size_t i = 0; i < blocks.size(); ++i) {
      x = parts("block " + std::to_string(i), blocks[i], x);
    }
    return parts("norm", norm, x).square().mean();
  }

  std::vector<nn::Sequential> blocks;
  nn::BatchNorm1d norm = nullptr;
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> buffers;
  Recomputable parts;
};

/// One process that trains.
struct Training {
  explicit Training(bool climbs, int64_t blocks = 4, BatchSizerOptions options = {})
      : model(blocks),
        sizer(StepGroup({}, model.parameters), Transaction(model.buffers, {kCpu}), [&] {
          options.batch_norm = BatchNormPolicy::freeze;
          options.ladder = climbs ? model.parts.modules() : nullptr;
          return options;
        }()) {
    reseed();
  }

  static void reseed() {
    at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>()->set_current_seed(7);
  }

  Outcome step(const at::Tensor& batch, std::optional<Split> split = {}) {
    clear();
    auto input = BatchSizer::input_of(batch);
    input.split = std::move(split);
    input.ask_kind = [&] { return kind_of(batch); };
    const auto loss_fn = [&](const at::Tensor& piece) { return model.loss(piece); };
    return sizer.step(input, brimful::detail::work_of(batch, loss_fn));
  }
  void clear() {
    for (auto& parameter : model.parameters) {
      parameter.mutable_grad().reset();
    }
  }
  /// Gradients, buffers, generator.
  std::vector<at::Tensor> state() const {
    std::vector<at::Tensor> all;
    for (const auto& parameter : model.parameters) {
      all.push_back(parameter.grad().defined() ? parameter.grad() : at::zeros({0}));
    }
    all.insert(all.end(), model.buffers.begin(), model.buffers.end());
    all.push_back(at::detail::getDefaultCPUGenerator().get_state());
    return copies(all);
  }

  Model model;
  BatchSizer sizer;
};

struct Limit {
  explicit Limit(int64_t room) { memory::set_limit(kCpu, used() + room); }
  ~Limit() { memory::set_limit(kCpu, {}); }
};

at::Tensor batch_of_rows(int64_t rows, int64_t tokens = kTokens) {
  return filled({rows, tokens, kWidth}, 3);
}

struct Plain {
  int64_t peak = 0;
  std::vector<at::Tensor> state;
};

/// Three steps with one row a piece, with all the room.
Plain plain(const at::Tensor& batch, int64_t blocks = 4) {
  Training training(false, blocks);
  Plain found;
  for (int i = 0; i < 3; ++i) {
    training.clear();
    const auto before = used();
    found.peak =
        training.step(batch, Split(static_cast<size_t>(batch.size(0)), 1)).peak_bytes - before;
  }
  found.state = training.state();
  return found;
}
}  // namespace

TEST_CASE("A row that does not fit trains with parts recomputed, bit by bit", "[sizer][ladder]") {
  const Quiet quiet;
  const double share = GENERATE(0.9, 0.7, 0.5);
  const int64_t rows = GENERATE(1, 2);
  const auto batch = batch_of_rows(rows);
  const auto expected = plain(batch);
  Training training(true);
  std::vector<Outcome> outcomes;
  {
    training.clear();
    const Limit limit(static_cast<int64_t>(share * static_cast<double>(expected.peak)));
    CHECK_THROWS_AS(Training(false).step(batch), BatchTooLarge);
    Training::reseed();
    for (int i = 0; i < 3; ++i) {
      outcomes.push_back(training.step(batch));
    }
  }
  CHECK(same_bits(training.state(), expected.state));
  CHECK(outcomes[0].rungs.recomputed ==
        std::vector<std::string>{"block 0", "block 1", "block 2", "block 3", "norm"});
  CHECK(outcomes[1].retries == 0);
  CHECK(outcomes[2].retries == 0);
  const auto chosen = outcomes[2].rungs.recomputed.size();
  CHECK(chosen >= 1);
  if (share > 0.6) {
    CHECK(chosen < 5);  // no more than has to be
  }
}

TEST_CASE("Rungs leave again when there is room, and cost nothing where rows fit",
          "[sizer][ladder]") {
  const Quiet quiet;
  const auto batch = batch_of_rows(1);
  const auto peak = plain(batch).peak;
  Training training(true);
  CHECK(training.step(batch).rungs.empty());
  training.clear();
  {
    const Limit limit(peak * 7 / 10);
    CHECK_FALSE(training.step(batch).rungs.empty());
    CHECK(training.sizer.report().rungs.recomputed.size() == 5);
  }
  training.clear();
  const Limit limit(2 * peak);
  const auto outcome = training.step(batch);
  CHECK(outcome.rungs.empty());
  CHECK(outcome.retries == 0);
}

TEST_CASE("Rungs of an earlier step are run again by their names", "[sizer][ladder]") {
  const Quiet quiet;
  const auto batch = batch_of_rows(1);
  const auto expected = plain(batch);
  Training training(true);
  Outcome outcome;
  for (int i = 0; i < 3; ++i) {
    training.clear();
    auto input = BatchSizer::input_of(batch);
    if (i > 0) {
      input.rungs = StepRungs{{"block 1", "norm"}, {}, false};
    }
    const auto loss_fn = [&](const at::Tensor& piece) { return training.model.loss(piece); };
    outcome = training.sizer.step(input, brimful::detail::work_of(batch, loss_fn));
  }
  CHECK(outcome.rungs.recomputed == std::vector<std::string>{"block 1", "norm"});
  CHECK(same_bits(training.state(), expected.state));
  training.clear();
  auto input = BatchSizer::input_of(batch);
  const auto loss_fn = [&](const at::Tensor& piece) { return training.model.loss(piece); };
  const auto work = brimful::detail::work_of(batch, loss_fn);
  input.rungs = StepRungs{{}, {"block 1"}, false};
  CHECK_THROWS_WITH(training.sizer.step(input, work),
                    Catch::Matchers::Contains("(offloaded: block 1)"));
  input.rungs = StepRungs{{"block 9"}, {}, false};
  CHECK_THROWS_WITH(training.sizer.step(input, work),
                    Catch::Matchers::Contains("(name: 'block 9')"));
}

TEST_CASE("A batch of other rows is measured for itself", "[sizer][ladder]") {
  const Quiet quiet;
  const auto small = batch_of_rows(1, kTokens / 2);
  const auto large = batch_of_rows(1);
  const auto peak = plain(large).peak;
  Training training(true);
  training.clear();
  const Limit limit(peak * 7 / 10);
  CHECK(training.step(small).rungs.empty());
  CHECK_FALSE(training.step(large).rungs.empty());
  CHECK(training.step(small).rungs.empty());
  CHECK(training.step(large).retries == 0);
}

TEST_CASE("A fault at any allocation of a step that recomputes leaves all as it was",
          "[sizer][ladder][faults]") {
  const Quiet quiet;
  const auto batch = batch_of_rows(2, 16);
  BatchSizerOptions options;
  options.max_retries = 0;
  options.piece_rows = 1;
  Training training(true, 2, options);
  const auto loss_fn = [&](const at::Tensor& piece) { return training.model.loss(piece); };
  const auto step = [&](const StepRungs& rungs) {
    auto input = BatchSizer::input_of(batch);
    input.rungs = rungs;
    return training.sizer.step(input, brimful::detail::work_of(batch, loss_fn));
  };
  step({});
  training.clear();
  Training::reseed();
  const auto before = training.state();
  const StepRungs rungs{{"block 0", "norm"}, {}, false};
  const auto in_use = used();
  bool fired = true;
  int64_t failed = 0;
  for (int64_t index = 0; fired; index += 3) {
    Training::reseed();
    {
      const memory::FaultAt fault(index);
      try {
        step(rungs);
      } catch (const c10::OutOfMemoryError&) {
        ++failed;
        REQUIRE(same_bits(training.state(), before));
      }
      fired = fault.fired();
    }
    training.clear();
    for (size_t i = 0; i < training.model.buffers.size(); ++i) {
      const at::NoGradGuard no_grad;
      training.model.buffers[i].copy_(before[training.model.parameters.size() + i]);
    }
    REQUIRE(used() == in_use);
  }
  CHECK(failed > 20);
}

TEST_CASE("What is left where every part is recomputed and one row does not fit",
          "[sizer][ladder]") {
  const Quiet quiet;
  const auto batch = batch_of_rows(1);
  const auto peak = plain(batch).peak;
  Training training(true);
  training.clear();
  const Limit limit(peak / 8);
  const auto before = training.state();
  try {
    training.step(batch);
    FAIL("it fits");
  } catch (const BatchTooLarge& error) {
    CHECK(std::string(error.what()).find("recomputed (block 0") != std::string::npos);
    CHECK(std::string(error.what()).find("recomputed or offloaded already") != std::string::npos);
  }
  CHECK(same_bits(training.state(), before));
}

TEST_CASE("Parts are named as the documentation shows it", "[sizer][ladder]") {
  const Quiet quiet;
  std::vector<nn::Sequential> blocks;
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < 3; ++i) {
    blocks.emplace_back(nn::Linear(kWidth, 64), nn::Tanh(), nn::Linear(64, kWidth));
    const auto made = blocks.back()->parameters();
    parameters.insert(parameters.end(), made.begin(), made.end());
  }
  brimful::BatchSizerOptions options;
  // clang-format off
  const brimful::Recomputable parts;
  options.ladder = parts.modules();
  const auto loss_fn = [&](at::Tensor x) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      x = parts("block " + std::to_string(i), blocks[i], x);
    }
    return x.square().mean();
  };
  // clang-format on
  BatchSizer sizer(StepGroup({}, parameters), Transaction({}, {kCpu}), options);
  const auto batch = batch_of_rows(1);
  const auto before = used();
  const auto peak = sizer.step(batch, loss_fn).peak_bytes - before;
  for (auto& parameter : parameters) {
    parameter.mutable_grad().reset();
  }
  const Limit limit(peak * 8 / 10);
  CHECK(sizer.step(batch, loss_fn).rungs.recomputed.size() == 3);
}

TEST_CASE("Of two ranks one recomputes, and the gradients are alike", "[sizer][ladder]") {
  const Quiet quiet;
  const Watchdog watchdog("one rank recomputes");
  Checks checks;
  std::vector<std::vector<at::Tensor>> all(4);
  run_ranks({2}, [&](int rank, const Group& group) {
    for (const bool climbs : {false, true}) {
      Recomputable parts;
      BatchSizerOptions options;
      options.ladder = parts.modules();
      Trainer trainer(group, std::make_shared<Net>(false), options);
      auto& net = *trainer.model.module();
      const auto batch = batch_of(rank, 0, 1);
      bool fails = climbs && rank == 1;
      const auto work =
          PieceWork{[&](int64_t begin, int64_t end) {
                      const auto x = slice_rows(batch.data, begin, end);
                      const auto forward = [&](const at::Tensor& in) { return net.forward(in); };
                      const auto y = parts("net", forward, x);
                      if (std::exchange(fails, false)) {
                        TORCH_CHECK_WITH(OutOfMemoryError, false, "planted");
                      }
                      const auto rows = static_cast<double>(end - begin);
                      return PieceLoss{at::mse_loss(y, slice_rows(batch.target, begin, end)), rows};
                    },
                    run_backward};
      const auto outcome = trainer.sizer.step(input_of(1), work);
      checks.expect(outcome.rungs.empty() != (climbs && rank == 1), "rungs");
      all[static_cast<size_t>(2 * rank + (climbs ? 1 : 0))] = copies(net.gradients());
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
  for (const auto& gradients : all) {
    CHECK(same_bits(gradients, all[0]));
  }
}

TEST_CASE("On CUDA a row that does not fit trains with parts recomputed", "[sizer][ladder][gpu]") {
  BRIMFUL_NEEDS_GPUS(1);
  const Quiet quiet;
  const c10::Device device(c10::DeviceType::CUDA, 0);
  const auto run = [&](std::optional<int64_t> room, int64_t& peak) {
    std::vector<nn::Sequential> blocks;
    std::vector<at::Tensor> parameters;
    at::manual_seed(3);
    for (int i = 0; i < 6; ++i) {
      nn::Sequential block(nn::Linear(64, 512), nn::GELU(), nn::Dropout(0.1), nn::Linear(512, 64));
      block->to(device);
      for (const auto& parameter : block->parameters()) {
        parameters.push_back(parameter);
      }
      blocks.push_back(std::move(block));
    }
    const Recomputable parts;
    BatchSizerOptions options;
    options.device = device;
    options.ladder = parts.modules();
    const auto batch = filled({1, 2048, 64}, 2).to(device);
    const auto loss_fn = [&](at::Tensor x) {
      for (size_t i = 0; i < blocks.size(); ++i) {
        x = parts("block " + std::to_string(i), blocks[i], x);
      }
      return x.square().mean();
    };
    BatchSizer sizer(StepGroup({}, parameters), Transaction({}, {device}), options);
    memory::release_cached(device);
    if (room) {
      memory::set_limit(device, memory::stats(device).reserved_bytes + *room);
    }
    std::vector<size_t> recomputed;
    for (int step = 0; step < 3; ++step) {
      for (auto& parameter : parameters) {
        parameter.mutable_grad().reset();
      }
      at::manual_seed(4 + step);
      const auto before = memory::stats(device).used_bytes;
      const auto outcome = sizer.step(batch, loss_fn);
      peak = outcome.peak_bytes - before;
      recomputed.push_back(outcome.rungs.recomputed.size());
    }
    memory::set_limit(device, {});
    std::vector<at::Tensor> gradients;
    for (const auto& parameter : parameters) {
      gradients.push_back(parameter.grad().cpu());
    }
    return std::pair(recomputed, gradients);
  };
  int64_t peak = 0;
  const auto [none, expected] = run(std::nullopt, peak);
  CHECK(none == std::vector<size_t>{0, 0, 0});
  int64_t less = 0;
  const auto [some, found] = run(peak * 7 / 10, less);
  CHECK(some.front() == 6);
  CHECK(some.back() > 0);
  CHECK(same_bits(found, expected));
}

TEST_CASE("Plans follow from what recomputed parts took", "[ladder]") {
  ladder::PartFigures piece;
  piece.calls = {{0, 10, 100, 180}, {1, 30, 400, 470}, {2, 5, 50, 120}};
  piece.second_run = {2, 1, 0};
  piece.peak_bytes = 90;
  const auto step = ladder::events_of(piece);
  const auto peak = [&](std::vector<int32_t> recomputed) {
    return ladder::cost_of(step, {std::move(recomputed), {}, false}).peak_bytes;
  };
  CHECK(peak({0, 1, 2}) == 470);
  CHECK(peak({0, 1}) == 470);        // 90 + 50 before the backward of 2, which has it in its peak
  CHECK(peak({1, 2}) == 570);        // 100 of 0 while 1 runs again
  CHECK(peak({0, 2}) == 120 + 400);  // of 1 while 2 runs again
  CHECK(peak({}) == 90 + 100 + 400 + 50);
  CHECK(ladder::cost_of(step, {{1}, {}, false}).more_ms == Approx(30 + ladder::kCallMs));
}

}  // namespace test_recomputable
