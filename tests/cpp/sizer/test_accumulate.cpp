#include <brimful/memory/fault.h>
#include "support/sizer_test.h"

namespace test_accumulate {

using namespace brimful;
using namespace brimful::test;

namespace {

std::vector<at::Tensor> sum_of(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  std::vector<at::Tensor> sums;
  for (size_t i = 0; i < a.size(); ++i) {
    sums.push_back(a[i] + b[i]);
  }
  return sums;
}

Outcome add(Trainer& trainer, const Batch& batch, std::optional<Split> split = {}) {
  auto input = input_of(batch.data.size(0), std::move(split));
  input.accumulate = true;
  return trainer.sizer.step(input, trainer.work(batch));
}

/// What fill() of the batch alone gives, for a rank that trains elsewhere in between.
std::vector<at::Tensor> gradients_of(Trainer& trainer, const Batch& batch, const Split& split) {
  trainer.fill(batch, split);
  auto gradients = copies(trainer.model->gradients());
  trainer.model->update(0);
  return gradients;
}

}  // namespace

TEST_CASE("A step that accumulates adds to the gradients, bit by bit", "[sizer]") {
  const int world_size = GENERATE(1, 2);
  const bool buckets = GENERATE(false, true);  // of their own, or one for all
  const Watchdog watchdog("accumulate");
  Checks checks;
  run_ranks({world_size}, [&](int rank, const Group& group) {
    Trainer trainer(group, std::make_shared<Net>(false), {},
                    buckets ? tiny_buckets() : ReducerOptions{});
    const auto first = gradients_of(trainer, batch_of(rank, 0, 4), {4});
    const auto second = gradients_of(trainer, batch_of(rank, 1, 4), {1, 3});
    const auto third = gradients_of(trainer, batch_of(rank, 2, 4), {2, 2});
    add(trainer, batch_of(rank, 0, 4), Split{4});  // to none
    checks.expect(same_bits(trainer.model->gradients(), first), "the first");
    add(trainer, batch_of(rank, 1, 4), Split{1, 3});
    const auto two = sum_of(first, second);
    checks.expect(same_bits(trainer.model->gradients(), two), "two");
    add(trainer, batch_of(rank, 2, 4), Split{2, 2});
    checks.expect(same_bits(trainer.model->gradients(), sum_of(two, third)), "three");
    const auto refused = catching([&] { trainer.fill(batch_of(rank, 3, 4)); });
    checks.expect(refused.type == Type::value_error, "without accumulate: " + refused.text);
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A step that fails or is repeated leaves earlier gradients as they were", "[sizer]") {
  const auto kind = GENERATE(Fault::Kind::out_of_memory, Fault::Kind::error);
  const auto at = GENERATE(Fault::At::forward, Fault::At::gradient);
  const Quiet quiet;
  const Watchdog watchdog("accumulate and fail");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Trainer trainer(group, std::make_shared<Net>(false));
    const Split split = rank == 1 && kind == Fault::Kind::out_of_memory ? Split{2, 2} : Split{4};
    const auto first = gradients_of(trainer, batch_of(rank, 0, 4), {4});
    const auto second = gradients_of(trainer, batch_of(rank, 1, 4), split);
    trainer.fill(batch_of(rank, 0, 4), Split{4});
    auto& fault = *trainer.model->fault;
    fault.at = at;
    fault.parameter = at == Fault::At::gradient ? 2 : 0;
    fault.kind = kind;
    fault.armed = rank == 1;
    const auto caught = catching([&] { add(trainer, batch_of(rank, 1, 4), Split{4}); });
    if (kind == Fault::Kind::error) {
      checks.expect(caught.type == (rank == 1 ? Type::runtime_error : Type::rank_failed),
                    caught.text);
      checks.expect(same_bits(trainer.model->gradients(), first), "not as before");
      add(trainer, batch_of(rank, 1, 4), split);
    } else {
      checks.expect(caught.type == Type::nothing, caught.text);
    }
    checks.expect(same_bits(trainer.model->gradients(), sum_of(first, second)), "the sum");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Ranks that do not accumulate alike all raise, and lose nothing", "[sizer]") {
  const Watchdog watchdog("accumulate on one rank");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Trainer trainer(group, std::make_shared<Net>(false));
    const auto caught = catching([&] {
      if (rank == 0) {
        add(trainer, batch_of(rank, 0, 4));
      } else {
        trainer.fill(batch_of(rank, 0, 4));
      }
    });
    checks.expect(
        caught.type == Type::value_error &&
            caught.text.find("pass the same accumulate on every rank") != std::string::npos &&
            caught.text.find("differ from rank 0: 1)") != std::string::npos,
        caught.text);
    const auto first = gradients_of(trainer, batch_of(rank, 0, 4), {4});
    trainer.fill(batch_of(rank, 0, 4));
    const auto again = catching([&] {  // here with gradients on both
      if (rank == 0) {
        add(trainer, batch_of(rank, 1, 4));
      } else {
        trainer.fill(batch_of(rank, 1, 4));
      }
    });
    checks.expect(again.type == (rank == 0 ? Type::rank_failed : Type::value_error), again.text);
    if (rank == 0) {
      checks.expect(same_bits(trainer.model->gradients(), first), "lost");
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A copy for which there is no room fails the step on all ranks, and is made", "[sizer]") {
  const Quiet quiet;
  const Watchdog watchdog("no room for a copy");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Trainer trainer(group, std::make_shared<Net>(false));
    trainer.fill(batch_of(rank, 0, 4));
    const auto before = copies(trainer.model->gradients());
    const auto caught = catching([&] {
      const auto input = [&] {
        auto some = input_of(4);
        some.accumulate = true;
        return some;
      }();
      std::optional<memory::FaultAt> fault;
      const auto work = trainer.work(batch_of(rank, 1, 4));
      if (rank == 1) {
        fault.emplace(2);  // the copies are the first that a step allocates
      }
      trainer.sizer.step(input, work);
    });
    checks.expect(caught.type == (rank == 1 ? Type::batch_too_large : Type::rank_out_of_memory),
                  caught.text);
    checks.expect(caught.text.find("accumulate: true") != std::string::npos, caught.text);
    checks.expect(same_bits(trainer.model->gradients(), before), "not as before");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("The user's step takes accumulate as an option, and a plan shows what is kept",
          "[sizer]") {
  Net net(false);
  BatchSizer sizer(StepGroup({}, net.parameters()), Transaction({}, {}));
  const auto batch = batch_of(0, 0, 6);
  const auto loss = [&](const at::Tensor& x) { return net.forward(x).square().mean(); };
  sizer.step(batch.data, loss);
  const auto once = copies(net.gradients());
  CHECK_THROWS_AS(sizer.step(batch.data, loss), c10::ValueError);
  sizer.step(batch.data, loss, {.accumulate = true});
  CHECK(same_bits(net.gradients(), sum_of(once, once)));
  sizer.step(std::optional<at::Tensor>(batch.data), loss, {.accumulate = true});
  CHECK(same_bits(net.gradients(), sum_of(once, sum_of(once, once))));
  const PieceWork work{[&](int64_t begin, int64_t end) {
                         return PieceLoss{loss(slice_rows(batch.data, begin, end)),
                                          static_cast<double>(end - begin)};
                       },
                       run_backward};
  auto input = input_of(6);
  CHECK_THROWS_AS(sizer.plan(input, work), c10::ValueError);
  input.accumulate = true;
  const auto before = copies(net.gradients());
  memory::install();
  const auto plan = sizer.plan(input, work);
  REQUIRE(plan);
  int64_t bytes = 0;
  for (const auto& gradient : before) {
    bytes += static_cast<int64_t>(gradient.nbytes());
  }
  CHECK(plan->kept_bytes == bytes);
  CHECK(same_bits(net.gradients(), before));
}

}  // namespace test_accumulate
