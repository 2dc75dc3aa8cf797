// Bad input raises on its rank with what is wrong, on the others as RankFailed; parameters stay, the next step works.
#include "support/sizer_test.h"

#include <functional>
#include <future>
#include <limits>
#include <thread>

namespace test_bad_input {

using namespace brimful;
using namespace brimful::test;

namespace {

constexpr int64_t kRows = 4;

struct BadInput {
  const char* name;
  Type type;
  const char* text;
  std::function<void(Trainer&, StepInput&, PieceWork&)> spoil;
};

/// The loss function of `work`, with `change` behind it.
void change_loss(PieceWork& work, const std::function<void(PieceLoss&)>& change) {
  work.forward = [forward = work.forward, change](int64_t begin, int64_t end) {
    auto piece = forward(begin, end);
    change(piece);
    return piece;
  };
}

std::vector<BadInput> bad_inputs() {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  return {
      {"an empty batch", Type::value_error, "the batch is empty (rows: 0)",
       [](Trainer&, StepInput& input, PieceWork&) { input.rows = 0; }},
      {"a negative weight of the batch", Type::value_error, "(weight: -2)",
       [](Trainer&, StepInput& input, PieceWork&) { input.weight = -2; }},
      {"a weight of the batch that is NaN", Type::value_error, "(weight: nan)",
       [=](Trainer&, StepInput& input, PieceWork&) { input.weight = kNaN; }},
      {"a split that does not cover the batch", Type::value_error,
       "(sum of split: 3, least: 1, rows: 4)",
       [](Trainer&, StepInput& input, PieceWork&) {
         input.split = Split{1, 2};
       }},
      {"a split with an empty piece", Type::value_error, "split must be positive numbers of rows",
       [](Trainer&, StepInput& input, PieceWork&) {
         input.split = Split{4, 0};
       }},
      {"an error of the batch", Type::value_error, "disagree in size (rows: 4 and 3)",
       [](Trainer&, StepInput& input, PieceWork&) {
         input.rows.reset();
         input.error = BatchSizer::input_of(std::pair(at::zeros({4}), at::zeros({3}))).error;
       }},
      {"a gradient that is not empty", Type::value_error,
       "a gradient is not empty at the step's start (shape: [6, 4])",
       [](Trainer& trainer, StepInput&, PieceWork&) {
         const auto& parameter = trainer.model->named_parameters()[0].value();
         parameter.mutable_grad() = at::ones_like(parameter);
       }},
      {"a negative weight of a piece", Type::value_error, "(weight: -1)",
       [](Trainer&, StepInput&, PieceWork& work) {
         change_loss(work, [](PieceLoss& piece) { piece.weight = -1; });
       }},
      {"a weight of a piece that is NaN", Type::value_error, "(weight: nan)",
       [=](Trainer&, StepInput&, PieceWork& work) {
         change_loss(work, [](PieceLoss& piece) { piece.weight = kNaN; });
       }},
      {"a loss that is no scalar", Type::value_error, "the loss is not a scalar (shape: [3])",
       [](Trainer&, StepInput&, PieceWork& work) {
         change_loss(work, [](PieceLoss& piece) { piece.loss = piece.loss.expand({3}); });
       }},
      {"a loss that needs no gradient", Type::value_error,
       "the loss needs no gradient (requires_grad: false)",
       [](Trainer&, StepInput&, PieceWork& work) {
         change_loss(work, [](PieceLoss& piece) { piece.loss = piece.loss.detach(); });
       }},
      {"no loss", Type::type_error, "the loss function returned no tensor",
       [](Trainer&, StepInput&, PieceWork& work) {
         change_loss(work, [](PieceLoss& piece) { piece.loss.reset(); });
       }},
      {"a step within a step", Type::value_error, "step is running already",
       [](Trainer& trainer, StepInput&, PieceWork& work) {
         change_loss(work,
                     [&trainer](PieceLoss&) { trainer.sizer.step(StepInput{}, PieceWork{}); });
       }},
  };
}

}  // namespace

TEST_CASE("Bad input fails the step on every rank with its message", "[sizer][bad input]") {
  memory::install();
  const int world_size = GENERATE(1, 2, 3);
  const Watchdog watchdog("bad input");
  Checks checks;
  run_ranks({world_size}, [&](int rank, const Group& group) {
    const int bad_rank = world_size - 1;
    for (const bool first_step : {true, false}) {
      Trainer trainer(group);
      if (!first_step) {
        trainer.step(batch_of(rank, 0, kRows));
      }
      for (const auto& bad : bad_inputs()) {
        const auto name = std::string(bad.name) + ", rank " + std::to_string(rank) + ": ";
        const auto before = trainer.state();
        const auto batch = batch_of(rank, 1, kRows);
        auto input = input_of(kRows);
        auto work = trainer.work(batch);
        if (rank == bad_rank) {
          bad.spoil(trainer, input, work);
        }
        const auto caught = catching([&] { trainer.sizer.step(input, work); });
        checks.expect(caught.type == (rank == bad_rank ? bad.type : Type::rank_failed),
                      name + "ended with " + caught.text);
        checks.expect(rank == bad_rank || caught.rank == bad_rank, name + "names another rank");
        checks.expect(caught.text.find(bad.text) != std::string::npos,
                      name + "says " + caught.text);
        checks.expect(caught.seconds < 2, name + "came late");
        checks.expect(same_bits(before, trainer.state()), name + "left a trace");
        trainer.model->update(0);
        const auto after = catching([&] { trainer.step(batch_of(rank, 2, kRows)); });
        checks.expect(after.type == Type::nothing, name + "the next step raised " + after.text);
      }
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A memory limit below what every step needs is refused at the step's start",
          "[sizer][bad input]") {
  memory::install();
  const Watchdog watchdog("a limit that is too low");
  Checks checks;
  const c10::Device cpu(c10::DeviceType::CPU);
  const auto limit = memory::stats(cpu).used_bytes + (int64_t{1} << 30);
  memory::set_limit(cpu, limit);
  run_ranks({2}, [&](int rank, const Group& group) {
    BatchSizerOptions options;
    options.required_bytes = [&] { return rank == 1 ? limit + 1 : limit; };
    Trainer trainer(group, std::make_shared<Net>(), options);
    const auto caught = catching([&] { trainer.step(batch_of(rank, 0, kRows)); });
    checks.expect(caught.type == (rank == 1 ? Type::value_error : Type::rank_failed), caught.text);
    checks.expect(caught.text.find("(limit: 1.0 GiB, needed before any sample: 1.0 GiB)") !=
                      std::string::npos,
                  caught.text);
  });
  memory::set_limit(cpu, std::nullopt);
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A wrapped module's parameters and gradients are what a limit must have room for",
          "[sizer][bad input]") {
  memory::install();
  const c10::Device cpu(c10::DeviceType::CPU);
  std::string text;
  run_ranks({1}, [&](int, const Group& group) {
    DistributedDataParallel<Net> model(std::make_shared<Net>(), group);
    BatchSizer sizer(model);
    const auto batch = batch_of(0, 0, kRows);
    const auto loss_fn = [&](const Batch& piece) {
      return at::mse_loss(model(piece.data), piece.target);
    };
    memory::set_limit(cpu, 100);
    text = catching([&] { sizer.step(batch, loss_fn); }).text;
    memory::set_limit(cpu, std::nullopt);
  });
  CHECK_THAT(text, Catch::Contains("(limit: 100 B, needed before any sample: "));
}

TEST_CASE("A sizer rejects bad options, and modules of different groups", "[sizer][bad input]") {
  BatchSizerOptions options;
  options.max_retries = -1;
  CHECK_THROWS_WITH(BatchSizer(StepGroup({}, {}), Transaction({}, {}), options),
                    Catch::Contains("(max_retries: -1)"));
  options = {};
  options.pieces = 0;
  CHECK_THROWS_WITH(BatchSizer(StepGroup({}, {}), Transaction({}, {}), options),
                    Catch::Contains("(pieces: 0)"));
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    DistributedDataParallel<Net> wide(std::make_shared<Net>(), group);
    run_ranks({1}, [&](int, const Group& alone) {
      DistributedDataParallel<Net> narrow(std::make_shared<Net>(), alone);
      const auto caught = catching([&] { StepGroup({wide.reducer(), narrow.reducer()}, {}); });
      checks.expect(caught.type == Type::value_error, caught.text);
      const auto expected = "first module's: " + std::to_string(rank) + " of 2";
      checks.expect(caught.text.find(expected) != std::string::npos, caught.text);
    });
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A model on two devices is refused", "[sizer][bad input]") {
  const auto cpu = at::zeros({2}).set_requires_grad(true);
  const auto meta = at::zeros({2}, at::kMeta).set_requires_grad(true);
  const auto caught = catching([&] {
    BatchSizer(StepGroup({}, {cpu, meta}), Transaction({}, {}));
  });
  CHECK(caught.type == Type::value_error);
  CHECK_THAT(caught.text, Catch::Contains("on several devices (devices: cpu and meta); move"));
}

TEST_CASE("A call while another thread is in a step is refused there", "[sizer][bad input]") {
  const Watchdog watchdog("two threads");
  const auto parameter = at::ones({2}).set_requires_grad(true);
  BatchSizer sizer(StepGroup({}, {parameter}), Transaction({}, {}));
  std::promise<void> inside;
  std::promise<void> leave;
  PieceWork work;
  work.forward = [&](int64_t begin, int64_t end) {
    inside.set_value();
    leave.get_future().wait();
    return PieceLoss{parameter.sum(), static_cast<double>(end - begin)};
  };
  work.backward = run_backward;
  std::thread other([&] { sizer.step(input_of(kRows), work); });
  inside.get_future().wait();
  const std::vector<std::pair<const char*, std::function<void()>>> calls{
      {"step", [&] { sizer.step(input_of(kRows), work); }},
      {"plan", [&] { sizer.plan(input_of(kRows), work); }},
      {"begin_loop", [&] { sizer.begin_loop(Next::yes, input_of(kRows)); }},
      {"announce_next", [&] { sizer.announce_next(Next::no, {}); }},
      {"load_state", [&] { sizer.load_state(sizer.state()); }},
  };
  for (const auto& [name, call] : calls) {
    const auto caught = catching(call);
    CHECK(caught.type == Type::value_error);
    CHECK_THAT(caught.text, Catch::Contains("another thread is in a call of this sizer (call: " +
                                            std::string(name) + ")"));
  }
  leave.set_value();
  other.join();
  CHECK(sizer.steps() == 1);
  CHECK(sizer.calls() == 1);
  CHECK(at::equal(parameter.grad(), at::ones({2})));
}

TEST_CASE("A sizer takes back the state it gave, and nothing else", "[sizer][bad input]") {
  BatchSizer sizer(StepGroup({}, {}), Transaction({}, {}));
  auto state = sizer.state();
  state["piece_rows"] = 3;
  state["steps"] = 5;
  sizer.load_state(state);
  CHECK(sizer.state() == state);
  CHECK(sizer.steps() == 5);
  state["piece_rows"] = -3;
  CHECK_THROWS_WITH(sizer.load_state(state), Catch::Contains("(piece_rows: -3"));
  CHECK_THROWS_WITH(sizer.load_state({{"steps", 1}}),
                    Catch::Contains("lacks an entry (name: piece_rows)"));
  CHECK(sizer.steps() == 5);
}

}  // namespace test_bad_input
