// A reducer goes on with another group, for all that hold it.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "support/catch.h"
#include "support/checks.h"
#include "support/trainer.h"
#include "support/watchdog.h"

#include <brimful/launch/run_ranks.h>

#include "launch/gloo_group.h"

namespace test_regroup {

using namespace brimful::test;
using brimful::run_ranks;

namespace {
constexpr std::chrono::milliseconds kTimeout{10000};

/// Groups of some of the ranks, by name.
struct Groups {
  c10::intrusive_ptr<c10d::HashStore> store = c10::make_intrusive<c10d::HashStore>();

  Group make(const std::string& name, int rank, int size) const {
    return brimful::launch::make_gloo_group(c10::make_intrusive<c10d::PrefixStore>(name, store),
                                            rank, size, brimful::launch::GlooDevice::loopback,
                                            kTimeout);
  }
};

/// Without BatchNorm, so that rows may lie on any rank.
std::shared_ptr<Net> plain_net() {
  return std::make_shared<Net>(false);
}

std::vector<at::Tensor> gradients_of(Trainer& trainer) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : trainer.model->parameters()) {
    gradients.push_back(parameter.grad());
  }
  return gradients;
}

void empty_gradients(Trainer& trainer) {
  for (const auto& parameter : trainer.model->parameters()) {
    parameter.mutable_grad().reset();
  }
}

/// What the ranks' batches give together, of one process.
std::vector<at::Tensor> gradients_of(const std::vector<Batch>& batches) {
  const Groups alone;
  Trainer trainer(alone.make("alone", 0, 1), plain_net());
  std::vector<at::Tensor> xs;
  std::vector<at::Tensor> ys;
  for (const auto& batch : batches) {
    xs.push_back(batch.data);
    ys.push_back(batch.target);
  }
  trainer.fill(Batch{at::cat(xs), at::cat(ys)});
  return gradients_of(trainer);
}

bool close(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.defined() == y.defined() && (!x.defined() || at::allclose(x, y, 1e-4, 1e-6));
  });
}
}  // namespace

TEST_CASE("A sizer's ranks go on without one of them", "[reducer][regroup]") {
  const Watchdog watchdog("a new group", std::chrono::seconds(60));
  Checks checks;
  const Groups groups;
  run_ranks({3}, [&](int rank, const Group& group) {
    Trainer trainer(group, plain_net());
    trainer.fill(batch_of(rank, 0, 4));
    empty_gradients(trainer);
    if (rank == 1) {
      return;
    }
    const int now = rank == 0 ? 0 : 1;
    const auto agreed =
        trainer.model.regroup(groups.make("next", now, 2), {.progress = 5 + now, .whole = true});
    trainer.sizer.regrouped();
    checks.expect(agreed.source == 1, "the furthest rank is the source");
    checks.expect(agreed.progress == std::vector<int64_t>{5, 6}, "what each rank had");
    checks.expect(trainer.sizer.world_size() == 2, "the sizer has the new group");
    checks.expect(trainer.model.reducer()->step() == 1, "steps are counted on");
    checks.expect(trainer.model.reducer()->counters().regroups == 1, "so are new groups");
    for (int step = 1; step < 3; ++step) {
      const auto outcome = trainer.fill(batch_of(now, step, 4 + now));
      checks.expect(outcome.weight == 9, "the mean is over two ranks");
      checks.expect(outcome.work_ms.size() == 2, "two records");
      const auto whole = gradients_of({batch_of(0, step, 4), batch_of(1, step, 5)});
      checks.expect(close(gradients_of(trainer), whole), "the exact mean");
      empty_gradients(trainer);
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE  // torch 2.15
TEST_CASE("A wrapper and its sizer follow a group that changes in place", "[reducer][regroup]") {
  const Watchdog watchdog("a group that changes", std::chrono::seconds(60));
  Checks checks;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks({3}, [&](int rank, const Group& group) {
    const auto become = [&](int64_t change, const std::vector<int>& members) {
      const auto place = "handle/" + std::to_string(change) + "/";
      const auto own = group->get_reconfigure_handle();
      store->set(place + std::to_string(rank), std::vector<uint8_t>(own.begin(), own.end()));
      std::vector<std::string> handles;
      for (const auto member : members) {
        const auto theirs = store->get(place + std::to_string(member));
        handles.emplace_back(theirs.begin(), theirs.end());
      }
      group->reconfigure({.uuid = change, .handles = handles, .timeout = kTimeout, .hints = {}})
          ->wait();
    };
    Trainer trainer(group, plain_net());
    trainer.fill(batch_of(rank, 0, 4));
    empty_gradients(trainer);
    if (rank == 1) {
      return;
    }
    become(1, {2, 0});
    const int now = rank == 0 ? 1 : 0;
    const auto whole = gradients_of({batch_of(0, 1, 4), batch_of(1, 1, 5)});
    const auto outcome = trainer.fill(batch_of(now, 1, 4 + now));
    checks.expect(outcome.weight == 9, "the mean is over two ranks");
    checks.expect(trainer.sizer.world_size() == 2, "the sizer has the group's size");
    checks.expect(trainer.model.reducer()->rank() == now, "the reducer has the group's rank");
    checks.expect(trainer.model.reducer()->counters().regroups == 1, "it regrouped once");
    checks.expect(close(gradients_of(trainer), whole), "the exact mean");
    empty_gradients(trainer);
    become(2, {0, 2});
    const int then = rank == 0 ? 0 : 1;
    trainer.model.step([&] {
      const auto batch = batch_of(then, 2, 4);
      at::mse_loss(trainer.model(batch.data), batch.target).backward();
    });
    checks.expect(trainer.model.reducer()->rank() == then, "a plain loop follows too");
    checks.expect(
        close(gradients_of(trainer), gradients_of({batch_of(0, 2, 4), batch_of(1, 2, 4)})),
        "the mean");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}
#endif

TEST_CASE("One rank goes on alone, and is joined", "[reducer][regroup]") {
  const Watchdog watchdog("a new group", std::chrono::seconds(60));
  Checks checks;
  const Groups groups;
  run_ranks({2}, [&](int rank, const Group& /*group*/) {
    Trainer trainer(groups.make("own " + std::to_string(rank), 0, 1), plain_net());
    if (rank == 0) {
      trainer.model.regroup(groups.make("alone", 0, 1));
      trainer.sizer.regrouped();
      trainer.step(batch_of(0, 0, 4));
      empty_gradients(trainer);
    }
    const auto agreed = trainer.model.regroup(
        groups.make("two", rank, 2), {.progress = rank == 0 ? 1 : -1, .synchronise = true});
    trainer.sizer.regrouped();
    checks.expect(agreed.source == 0, "the source");
    const auto outcome = trainer.fill(batch_of(rank, 1, 4));
    checks.expect(outcome.weight == 8, "both are in the mean");
    const auto all = gather_bytes(*trainer.model.reducer(), {static_cast<uint8_t>(7 + rank)});
    checks.expect(all == std::vector<std::vector<uint8_t>>{{7}, {8}}, "gathered");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Ranks of other models are refused, and keep their group", "[reducer][regroup]") {
  const Watchdog watchdog("a new group", std::chrono::seconds(60));
  Checks checks;
  const Groups groups;
  run_ranks({2}, [&](int rank, const Group& /*group*/) {
    const auto own = groups.make("own " + std::to_string(rank), 0, 1);
    std::vector<at::Tensor> parameters{at::zeros({2 + rank}).set_requires_grad(true)};
    const auto reducer = brimful::Reducer::create(parameters, {}, own);
    const auto caught = catching([&] { reducer->regroup(groups.make("both", rank, 2)); });
    checks.expect(caught.type == Caught::Type::value_error, caught.text);
    checks.expect(reducer->world_size() == 1, "it has its group still");
    parameters[0].sum().backward();
    checks.expect(parameters[0].grad().defined(), "and works");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Gradients outlive the old buffers, and the old state goes", "[reducer][regroup]") {
  const Watchdog watchdog("a new group", std::chrono::seconds(60));
  Checks checks;
  const Groups groups;
  run_ranks({2}, [&](int rank, const Group& group) {
    Trainer trainer(group, plain_net());
    trainer.fill(batch_of(rank, 0, 4));
    const auto before = copies(gradients_of(trainer));
    const auto* old = gradients_of(trainer)[0].const_data_ptr();
    trainer.model.regroup(groups.make("next", rank, 2));
    trainer.sizer.regrouped();
    checks.expect(same_bits(gradients_of(trainer), before), "the values");
    checks.expect(gradients_of(trainer)[0].const_data_ptr() != old, "elsewhere");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

}  // namespace test_regroup
