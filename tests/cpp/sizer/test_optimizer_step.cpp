// What an optimizer's step can do to a training: fail before it begins for want of room, or in its middle.
#include <torch/optim/adam.h>
#include "support/sizer_test.h"

#include <brimful/error.h>
#include <brimful/sizer/optimizer_bytes.h>

namespace test_optimizer_step {

using namespace brimful;
using namespace brimful::test;

namespace {
constexpr int64_t kRows = 4;
const c10::Device kCpu(c10::DeviceType::CPU);
const std::string kHalf = "the optimizer failed in the middle of its step (planted)";

std::string half_step_words(const std::function<void()>& call) {
  try {
    call();
  } catch (const HalfStepError& error) {
    return error.what_without_backtrace();
  }
  return "no HalfStepError";
}

struct Limit {
  explicit Limit(int64_t bytes) { memory::set_limit(kCpu, bytes); }
  ~Limit() { memory::set_limit(kCpu, std::nullopt); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;
};
}  // namespace

TEST_CASE("An error inside the optimizer is a HalfStepError, and the other ranks learn of it",
          "[sizer][faults]") {
  const Quiet quiet;
  const bool oom = GENERATE(false, true);
  const Watchdog watchdog("an optimizer that fails in the middle");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Trainer trainer(group);
    trainer.fill(batch_of(rank, 0, kRows));
    const auto words = half_step_words([&] {
      trainer.sizer.optimizer_step([&] {
        TORCH_CHECK_WITH(OutOfMemoryError, rank == 0 || !oom, "planted");
        TORCH_CHECK_WITH(ValueError, rank == 0 || oom, "planted");
        trainer.model->update();
      });
    });
    if (rank == 1) {
      checks.expect(words == kHalf + "; parameters may be half updated: load a checkpoint", words);
      checks.expect(!trainer.sizer.expects_step(), "is told once");
      return;
    }
    checks.expect(words == "no HalfStepError", words);
    const auto caught = catching([&] { trainer.fill(batch_of(rank, 1, kRows)); });
    checks.expect(caught.type == Type::rank_failed, "no RankFailed: " + caught.text);
    checks.expect(caught.rank == 1, "another rank");
    checks.expect(caught.text.find(kHalf) != std::string::npos, caught.text);
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Errors that are announced already pass through an optimizer's step", "[sizer][faults]") {
  BatchSizer sizer(StepGroup({}, {}), Transaction({}, {}));
  CHECK(half_step_words([&] {
          sizer.optimizer_step([] { throw HalfStepError("of another sizer"); });
        }) == "of another sizer");
  CHECK_THROWS_AS(
      sizer.optimizer_step([] { throw RankFailed(1, 2, FailureKind::error, "of another rank"); }),
      RankFailed);
  CHECK(half_step_words([&] {
          sizer.optimizer_step([] { throw std::runtime_error("planted"); });
        }).rfind(kHalf, 0) == 0);
  int steps = 0;
  sizer.optimizer_step([&] { ++steps; });
  CHECK(steps == 1);
}

TEST_CASE("A step whose optimizer has no room fails before anything runs", "[sizer]") {
  const Quiet quiet;
  const auto parameter = at::zeros({1 << 16}).set_requires_grad(true);
  torch::optim::Adam optimizer({parameter}, torch::optim::AdamOptions(0.1));
  BatchSizerOptions options;
  options.optimizer_bytes = [&] { return next_step_bytes(optimizer); };
  options.standing_bytes = [&] { return standing_bytes({parameter}, {}, kCpu); };
  BatchSizer sizer(StepGroup({}, {parameter}), Transaction({}, {}), options);
  int calls = 0;
  const PieceWork work{[&](int64_t begin, int64_t end) {
                         ++calls;
                         return PieceLoss{parameter.sum(), static_cast<double>(end - begin)};
                       },
                       run_backward};
  const auto before = memory::stats(kCpu).used_bytes;
  const auto needed = next_step_bytes(optimizer);
  CHECK(needed >= 3 * static_cast<int64_t>(parameter.nbytes()));  // a gradient and two moments
  {
    const Limit limit(before + needed - 1);
    try {
      sizer.step(input_of(kRows), work);
      FAIL("nothing was thrown");
    } catch (const BatchTooLarge& error) {
      CHECK_THAT(error.what_without_backtrace(),
                 Catch::StartsWith("the optimizer's step would run out of memory, whatever the "
                                   "split, on rank 0 of 1 (device: cpu, rows: 4)"));
      const auto& facts = error.facts();
      CHECK(facts.device == "cpu");
      CHECK(facts.tried.empty());
      CHECK(facts.bytes.back() == std::pair<std::string, int64_t>("the optimizer's step", needed));
      CHECK(facts.limit_bytes == before + needed - 1);
      CHECK_FALSE(facts.advice.empty());
    }
    CHECK(calls == 0);
    CHECK_FALSE(parameter.grad().defined());
  }
  const Limit limit(before + needed + (1 << 14));
  CHECK(sizer.step(input_of(kRows), work).pieces == 1);
  optimizer.step();
}

TEST_CASE("Ranks that were not updated alike all raise until their parameters are the same",
          "[sizer][faults]") {
  const Quiet quiet;
  const int idle = GENERATE(0, 1);
  const bool behind_the_counter = GENERATE(false, true);  // as torch::optim::SGD does
  const Watchdog watchdog("an update that one rank leaves out");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Trainer trainer(group);
    const auto update = [&] {
      for (const auto& parameter : trainer.model->parameters()) {
        const at::NoGradGuard no_grad;
        const auto values = behind_the_counter ? parameter.variable_data() : parameter;
        values.sub_(parameter.grad(), 0.1);
        parameter.mutable_grad().reset();
      }
    };
    const auto fill = [&](int64_t step) {
      return catching([&] { trainer.fill(batch_of(rank, step, kRows)); });
    };
    for (int64_t step = 0; step < 2; ++step) {
      checks.expect(fill(step).type == Type::nothing, "a step before");
      update();
    }
    checks.expect(fill(2).type == Type::nothing, "the step without an update");
    if (rank != idle) {
      update();
    } else {
      trainer.model.reducer()->attempt().discard();
    }
    const auto words = "rank " + std::to_string(1 - idle) +
                       " updated them after the step before, and rank " + std::to_string(idle) +
                       " did not";
    for (int64_t step = 3; step < 5; ++step) {
      const auto caught = fill(step);
      checks.expect(caught.type == Type::value_error, "no PlanMismatch: " + caught.text);
      checks.expect(caught.text.find(words) != std::string::npos, caught.text);
      for (const auto& gradient : trainer.model->gradients()) {
        checks.expect(!gradient.defined(), "a gradient of a step that failed");
      }
    }
    trainer.model.reducer()->broadcast(trainer.model->parameters(), 1 - idle);
    for (int64_t step = 5; step < 8; ++step) {
      const auto caught = fill(step);
      checks.expect(caught.type == Type::nothing, "with the same parameters: " + caught.text);
      update();
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Parameters in no reducer are refused beside other ranks, unless that is meant",
          "[sizer][bad input]") {
  const Watchdog watchdog("parameters in no reducer");
  Checks checks;
  run_ranks({2}, [&](int, const Group& group) {
    DistributedDataParallel<Net> model(std::make_shared<Net>(), group);
    const auto make = [&](bool local) {
      BatchSizerOptions options;
      options.local = local;
      const auto alone = at::zeros({2}).requires_grad_();
      BatchSizer(StepGroup({model.reducer()}, {alone}), Transaction({}, {}), options);
    };
    const auto refused = catching([&] { make(false); });
    checks.expect(refused.type == Type::value_error, refused.text);
    checks.expect(refused.text.find("stay on this rank (ranks: 2)") != std::string::npos,
                  refused.text);
    checks.expect(catching([&] { make(true); }).type == Type::nothing, "local");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

}  // namespace test_optimizer_step
