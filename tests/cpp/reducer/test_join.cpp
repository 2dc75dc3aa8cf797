// Ranks with different numbers of batches, and communication hooks of several collectives, without Python.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include "support/catch.h"
#include "support/checks.h"
#include "support/trainer.h"
#include "support/watchdog.h"

#include <brimful/launch/run_ranks.h>

namespace test_join {

using brimful::run_ranks;
using namespace brimful::test;

namespace {

using HookFuture = c10::intrusive_ptr<c10::ivalue::Future>;

/// An all_reduce of one element, and when that has ended one of the bucket.
class ChainedHook final : public c10d::CppCommHookInterface<Group> {
 public:
  explicit ChainedHook(Group group) : CppCommHookInterface(std::move(group)) {}

  HookFuture runHook(c10d::GradBucket& bucket) override {
    int64_t numel = 0;
    for (const auto& parameter : bucket.getParameters()) {
      numel += parameter.numel();
    }
    TORCH_CHECK(bucket.getBuffer().numel() == numel, "a bucket has gaps");
    std::vector<at::Tensor> one{at::ones({1})};
    const auto group = state_;
    return group->allreduce(one)->getFuture()->then(
        [group, buffer = bucket.getBuffer()](c10::ivalue::Future& /*first*/) -> c10::IValue {
          std::vector<at::Tensor> mean{buffer / group->getSize()};
          group->allreduce(mean)->wait();
          return c10::IValue(mean[0]);
        },
        c10::TensorType::get());
  }
};

brimful::DistributedDataParallel<Net> hooked_model(const Group& group) {
  brimful::DistributedDataParallel<Net> model(std::make_shared<Net>(), group, tiny_buckets());
  model.reducer()->register_comm_hook(std::make_unique<ChainedHook>(group), "chained");
  return model;
}

void train_once(brimful::DistributedDataParallel<Net>& model, int rank, int step) {
  const auto batch = batch_of(rank, step, 8);
  at::mse_loss(model(batch.data), batch.target).backward();
  model->update();
}

}  // namespace

TEST_CASE("A rank that drains keeps the order of a hook's collectives", "[reducer][collectives]") {
  const Watchdog watchdog("a hook of several collectives");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    auto model = hooked_model(group);
    for (int step = 0; step < 4; ++step) {
      const bool fails = step == 1 + rank;
      const bool spared = step == 0 || step == 3;
      std::string error;
      try {
        model.step([&] {
          TORCH_CHECK(!fails, "planted");
          train_once(model, rank, step);
        });
      } catch (const std::exception& e) {
        error = e.what();
      }
      checks.expect(error.empty() == spared, "step " + std::to_string(step) + ": " + error);
      checks.expect(spared || error.find("planted") != std::string::npos, error);
      model->update();
    }
    model.reducer()->loop().begin_join(false, false);
    for (int step = 0; step < 1 + 2 * rank; ++step) {
      train_once(model, rank, step);
    }
    while (model.reducer()->loop().join_step()) {
    }
    model.reducer()->loop().end_join();
    checks.expect(model.reducer()->loop().active() == std::vector<int>{}, "the join has ended");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("All ranks raise before a forward that one would miss", "[reducer]") {
  const Watchdog watchdog("a join that raises early");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    brimful::DistributedDataParallel<Net> model(std::make_shared<Net>(), group, tiny_buckets());
    model.reducer()->loop().begin_join(false, true);
    std::string error;
    try {
      for (int step = 0; step < 1 + rank; ++step) {
        model.step([&] { train_once(model, rank, step); });
      }
      while (model.reducer()->loop().join_step()) {
      }
    } catch (const std::exception& e) {
      error = e.what();
    }
    model.reducer()->loop().end_join();
    checks.expect(error.find("data ended on some ranks") != std::string::npos, error);
    train_once(model, rank, 5);
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

}  // namespace test_join
