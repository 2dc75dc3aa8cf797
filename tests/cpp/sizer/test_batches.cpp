// Loops over batches: bodies that make several steps, contain other loops, fail and go on.
#include <ATen/ATen.h>
#include "support/catch.h"
#include "support/quiet_log.h"
#include "support/sizer_test.h"
#include "support/watchdog.h"

#include <stdexcept>
#include <string>
#include <vector>

namespace test_batches {

using namespace brimful;
using namespace brimful::test;

namespace {
constexpr int64_t kRows = 4;

using Loader = std::vector<Batch>;

Loader loader_of(int rank, int batches) {
  Loader loader;
  for (int i = 0; i < batches; ++i) {
    loader.push_back(batch_of(rank, i, kRows));
  }
  return loader;
}

Outcome train(Trainer& trainer, const std::optional<Batch>& batch) {
  auto outcome = trainer.sizer.step(batch, [&](const Batch& piece) {
    return at::mse_loss(trainer.model(piece.data), piece.target);
  });
  trainer.model->update();
  return outcome;
}

/// Ends a loop that would go on for ever.
void require_within(size_t bodies, size_t most) {
  if (bodies > most) {
    throw std::logic_error("the loop goes on after the last batch");
  }
}

/// `work(rank, trainer)` is one rank's program.
template <typename Work>
std::vector<std::string> failures_of(int ranks, const Work& work) {
  Checks checks;
  run_ranks({ranks}, [&](int rank, const Group& group) {
    Trainer trainer(group);
    const auto caught = catching([&] { work(rank, trainer, checks); });
    checks.expect(caught.type == Caught::Type::nothing, caught.text);
  });
  return checks.failures();
}
}  // namespace

TEST_CASE("A body may make several steps", "[sizer]") {
  const auto counts = GENERATE(std::vector<int>{3}, std::vector<int>{2, 4}, std::vector<int>{3, 0});
  const auto steps = GENERATE(size_t{2}, size_t{3});
  const Watchdog watchdog("several steps in a body");
  const auto bodies = static_cast<size_t>(*std::max_element(counts.begin(), counts.end()));
  const auto work = [&](int rank, Trainer& trainer, Checks& checks) {
    auto loader = loader_of(rank, counts[rank]);
    size_t seen = 0;
    for (auto& batch : trainer.sizer.batches(loader)) {
      require_within(++seen, bodies);
      checks.expect(batch.has_value() == (static_cast<int>(seen) <= counts[rank]), "the data");
      for (size_t i = 0; i < steps; ++i) {
        checks.expect(train(trainer, batch).last == (seen == bodies), "Outcome::last");
      }
    }
    checks.expect(seen == bodies, "bodies: " + std::to_string(seen));
    checks.expect(trainer.sizer.steps() == static_cast<int64_t>(bodies * steps), "steps");
  };
  CHECK(failures_of(static_cast<int>(counts.size()), work) == std::vector<std::string>{});
}

TEST_CASE("A step that failed is made again in the same body", "[sizer]") {
  const QuietLog quiet;
  const Watchdog watchdog("a step that failed");
  const auto work = [](int rank, Trainer& trainer, Checks& checks) {
    auto loader = loader_of(rank, 3);
    size_t seen = 0;
    for (auto& batch : trainer.sizer.batches(loader)) {
      require_within(++seen, 3);
      const auto caught = catching([&] {
        trainer.sizer.step(batch, [](const Batch& /*piece*/) -> at::Tensor {
          throw std::runtime_error("planted");
        });
      });
      checks.expect(caught.text.find("planted") != std::string::npos, caught.text);
      train(trainer, batch);
    }
    checks.expect(seen == 3, "bodies: " + std::to_string(seen));
  };
  const auto ranks = GENERATE(1, 2);
  CHECK(failures_of(ranks, work) == std::vector<std::string>{});
}

TEST_CASE("A loop may be in the body of another one, which goes on", "[sizer]") {
  const auto counts = GENERATE(std::vector<int>{3}, std::vector<int>{2, 3});
  const bool inner_first = GENERATE(true, false);
  const bool left = GENERATE(true, false);
  const Watchdog watchdog("nested loops");
  const auto work = [&](int rank, Trainer& trainer, Checks& checks) {
    auto outer = loader_of(rank, counts[rank]);
    auto inner = loader_of(rank, 2 + rank);
    const size_t bodies = counts.size() + 1;  // the last rank has most
    size_t seen = 0;
    const auto within = [&] {
      size_t here = 0;
      for (auto& batch : trainer.sizer.batches(inner)) {
        require_within(++here, left ? 1 : bodies);
        train(trainer, batch);
        if (left) {
          break;
        }
      }
      checks.expect(here == (left ? 1 : bodies), "inner bodies: " + std::to_string(here));
    };
    for (auto& batch : trainer.sizer.batches(outer)) {
      require_within(++seen, 3);
      if (inner_first) {
        within();
      }
      checks.expect(train(trainer, batch).last == (seen == 3), "Outcome::last");
      if (!inner_first) {
        within();
      }
    }
    checks.expect(seen == 3, "bodies: " + std::to_string(seen));
    size_t again = 0;
    for (auto& batch : trainer.sizer.batches(outer)) {
      require_within(++again, 3);
      train(trainer, batch);
    }
    checks.expect(again == 3, "another loop afterwards");
  };
  CHECK(failures_of(static_cast<int>(counts.size()), work) == std::vector<std::string>{});
}

TEST_CASE("A batch that the outer loop leaves out is an error", "[sizer]") {
  const Watchdog watchdog("a batch that is left out");
  Checks checks;
  run_ranks({1}, [&](int rank, const Group& group) {
    Trainer trainer(group);
    auto outer = loader_of(rank, 2);
    auto inner = loader_of(rank, 2);
    const auto caught = catching([&] {
      for (auto& batch : trainer.sizer.batches(outer)) {
        checks.expect(batch.has_value(), "the data");
        for (auto& other : trainer.sizer.batches(inner)) {
          train(trainer, other);
        }
      }
    });
    checks.expect(caught.text.find("a batch was left out") != std::string::npos, caught.text);
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("An exception behind an inner loop is announced to those in the outer one",
          "[sizer][faults]") {
  const QuietLog quiet;
  const Watchdog watchdog("an exception behind an inner loop");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Trainer trainer(group);
    auto outer = loader_of(rank, 3);
    auto inner = loader_of(rank, 2);
    const auto caught = catching([&] {
      for (auto& batch : trainer.sizer.batches(outer)) {
        for (auto& other : trainer.sizer.batches(inner)) {
          train(trainer, other);
        }
        if (rank == 1) {
          throw std::runtime_error("the disk is full");
        }
        train(trainer, batch);
      }
    });
    checks.expect(rank == 1 || caught.type == Caught::Type::rank_failed, caught.text);
    checks.expect(rank == 1 || caught.text.find("ended its loop") != std::string::npos,
                  caught.text);
    checks.expect(caught.seconds < 10, "seconds: " + std::to_string(caught.seconds));
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

}  // namespace test_batches
