// An exception that ends a rank's loop between two steps: the others raise in their next one, and know who it was.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "support/catch.h"
#include "support/checks.h"
#include "support/trainer.h"
#include "support/watchdog.h"

#include <brimful/launch/run_ranks.h>

#include <stdexcept>

namespace test_unwinding {

using brimful::run_ranks;
using namespace brimful::test;

namespace {
constexpr double kPromptly = 2;  // seconds
constexpr int kSteps = 4;

struct Loop {
  int world_size = 2;
  int failing = 0;
  int after = 0;  // steps
};

std::string name_of(const Loop& loop, int rank, const Caught& caught) {
  return "W=" + std::to_string(loop.world_size) + ", rank " + std::to_string(loop.failing) +
         " fails after " + std::to_string(loop.after) + " steps, rank " + std::to_string(rank) +
         " ended with '" + caught.text + "' after " + std::to_string(caught.seconds) + " s";
}

/// `train(group, between)` is one rank's program; it calls between(step) behind each of its steps.
template <typename Train>
void expect_named(const Train& train) {
  Checks checks;
  const Watchdog watchdog("an exception between two steps", std::chrono::seconds(120));
  for (const int world_size : {2, 3}) {
    for (int failing = 0; failing < world_size; ++failing) {
      for (int after = 1; after < kSteps; ++after) {
        const Loop loop{world_size, failing, after};
        run_ranks({world_size}, [&](int rank, const Group& group) {
          const auto caught = catching([&] {
            train(group, [&](int step) {
              if (rank == failing && step + 1 == after) {
                throw std::runtime_error("the disk is full");
              }
            });
          });
          const auto name = name_of(loop, rank, caught);
          checks.expect(caught.seconds < kPromptly, name);
          checks.expect(caught.type == (rank == failing ? Caught::Type::runtime_error
                                                        : Caught::Type::rank_failed),
                        name);
          checks.expect(rank == failing || caught.rank == failing, name);
          checks.expect(rank == failing ||
                            caught.text.find("an exception ended its loop") != std::string::npos,
                        name);
        });
      }
    }
  }
  CHECK(checks.failures() == std::vector<std::string>{});
}
}  // namespace

TEST_CASE("An exception between two steps of a plain loop is announced", "[reducer][faults]") {
  expect_named([](const Group& group, const auto& between) {
    brimful::DistributedDataParallel<Net> model(std::make_shared<Net>(), group, tiny_buckets());
    for (int step = 0; step < kSteps; ++step) {
      const auto batch = batch_of(group->getRank(), step, 4);
      at::mse_loss(model(batch.data), batch.target).backward();
      model->update();
      between(step);
    }
  });
}

TEST_CASE("An exception between two steps of a sizer's loop is announced", "[sizer][faults]") {
  expect_named([](const Group& group, const auto& between) {
    Trainer trainer(group);
    std::vector<Batch> loader;
    for (int step = 0; step < kSteps; ++step) {
      loader.push_back(batch_of(group->getRank(), step, 4));
    }
    int step = 0;
    for (auto& batch : trainer.sizer.batches(loader)) {
      trainer.sizer.step(batch, [&](const Batch& piece) {
        return at::mse_loss(trainer.model(piece.data), piece.target);
      });
      trainer.model->update();
      between(step++);
    }
  });
}

}  // namespace test_unwinding
