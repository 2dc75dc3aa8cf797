// Ranks that have nothing but a gloo group in common: each a thread here, with its own stages and its own pipeline.
#include <ATen/ATen.h>
#include <brimful/error.h>
#include <brimful/launch/run_ranks.h>
#include <brimful/pipeline/pipeline.h>
#include <brimful/pipeline/schedules.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "pipeline/transport/peers.h"
#include "support/catch.h"
#include "support/checks.h"
#include "support/quiet_log.h"
#include "support/stages.h"
#include "support/watchdog.h"

#include <atomic>
#include <chrono>

namespace test_pipeline_processes {

using namespace brimful;
using namespace brimful::test;
using pipeline::Pipeline;
using pipeline::PipelineOptions;

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
constexpr int64_t kRows = 11;
constexpr int kMicrobatches = 4;

/// What one rank has of a model that all ranks make alike.
struct Rank {
  /// `sockets`: as between ranks on one host.
  Rank(int rank, const Group& group, const std::string& schedule, int per_rank, bool sockets = true)
      : Rank(rank, group,
             pipeline::make_schedule(schedule, group->getSize(), per_rank, kMicrobatches),
             sockets) {}
  /// One of a name is made anew for each number of microbatches.
  Rank(int rank, const Group& group, const pipeline::Schedule& schedule, bool sockets = true)
      : model(schedule.stages) {
    const auto placed = pipeline::rank_of_stage(schedule);
    std::vector<pipeline::Stage> own;
    for (int i = 0; i < schedule.stages; ++i) {
      if (placed[i] == rank) {
        own.push_back(pipeline::make_stage(model.layers[i], model.layers[i].parameters()));
        own.back().forward = [this, inner = own.back().forward](const pipeline::Value& input) {
          auto output = inner(input);
          if (stage_calls++ == fail_in_stage) {
            throw std::runtime_error("planted");
          }
          return output;
        };
        own_stages.push_back(i);
      }
    }
    PipelineOptions options;
    options.peers = peers =
        std::make_shared<pipeline::Peers>(group, pipeline::Peers::MakePair{}, sockets);
    if (pipeline::has_communication(schedule)) {
      options.fixed_schedule = schedule;
    }
    options.schedule = schedule.name;
    options.microbatches = kMicrobatches;
    options.before_action = [this](int, int index, const pipeline::Action&) {
      if (index == fail_at && fail_left-- > 0) {
        TORCH_CHECK_WITH(OutOfMemoryError, !out_of_memory, "planted");
        throw std::runtime_error("planted");
      }
    };
    whole = mse(model(x), y);
    whole.backward();
    expected = copies(model.gradients());
    model.zero_grad();
    pipe = std::make_unique<Pipeline>(std::move(own), std::move(options));
  }

  /// Gradients of this rank's own layers.
  bool as_expected(double factor = 1) const {
    return all_close_in(own_stages, model.gradients(), expected, factor);
  }

  Layers model;
  std::vector<int> own_stages;
  at::Tensor x = filled({kRows, 4}, 3, at::kDouble);
  at::Tensor y = filled({kRows, 4}, 4, at::kDouble);
  at::Tensor whole;
  std::vector<at::Tensor> expected;
  int stage_calls = 0;
  int fail_in_stage = -1;
  int fail_at = -1;
  int fail_left = 0;
  bool out_of_memory = false;
  std::shared_ptr<pipeline::Peers> peers;
  std::unique_ptr<Pipeline> pipe;
};

struct Case {
  std::string schedule;
  int ranks;
  int per_rank;
};
}  // namespace

TEST_CASE("Processes give the gradients of the whole model", "[pipeline][processes]") {
  const Watchdog watchdog("processes", std::chrono::seconds(60));
  const auto wanted = GENERATE(values<Case>({{"1f1b", 2, 1},
                                             {"gpipe", 3, 1},
                                             {"interleaved_1f1b", 2, 2},
                                             {"looped_bfs", 2, 2},
                                             {"zb_h1", 2, 1},
                                             {"zb_h2", 3, 1},
                                             {"zbv", 2, 2},
                                             {"dualpipev", 2, 2}}));
  const bool sends = GENERATE(false, true);  // a schedule with actions of its own for messages
  CAPTURE(wanted.schedule, sends);
  Checks checks;
  run_ranks({wanted.ranks}, [&](int rank, const Group& group) {
    const auto named =
        pipeline::make_schedule(wanted.schedule, wanted.ranks, wanted.per_rank, kMicrobatches);
    Rank own(rank, group, sends ? pipeline::with_communication(named) : named);
    for (int step = 1; step <= 3; ++step) {
      const auto outcome = own.pipe->step(own.x, own.y, mse);
      checks.expect(own.as_expected(step), "gradients of rank " + std::to_string(rank));
      checks.expect(std::abs(outcome.loss - own.whole.item<double>()) < 1e-12, "loss");
    }
    const auto output = own.pipe->forward(own.x);
    const bool last = !output.tensors.empty();
    const at::NoGradGuard no_grad;
    checks.expect(!last || at::allclose(output.tensors[0], own.model(own.x), 1e-12, 1e-14),
                  "outputs");
  });
  CHECK(checks.failures().empty());
}

TEST_CASE("A schedule of forwards alone runs inference over processes", "[pipeline][processes]") {
  const QuietLog quiet;
  const Watchdog watchdog("forwards over processes");
  const int per_rank = GENERATE(1, 2);
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Rank own(rank, group, "forward_only", per_rank);
    const auto output = own.pipe->forward(own.x);
    const at::NoGradGuard no_grad;
    checks.expect(output.tensors.empty() == (rank == 0), "the last stage has the outputs");
    checks.expect(rank == 0 || at::allclose(output.tensors[0], own.model(own.x), 1e-12, 1e-14),
                  "outputs");
  });
  CHECK(checks.failures().empty());
}

TEST_CASE("A step has 2 (p - 1) messages beside those of its stages", "[pipeline][processes]") {
  const Watchdog watchdog("messages of verdicts");
  const int ranks = GENERATE(2, 3, 5);
  std::atomic<int64_t> sent{0};
  run_ranks({ranks}, [&](int rank, const Group& group) {
    Rank own(rank, group, "1f1b", 1);
    own.pipe->step(own.x, own.y, mse);  // which compares set-ups too
    const auto before = own.peers->messages();
    for (int step = 0; step < 3; ++step) {
      own.pipe->step(own.x, own.y, mse);
    }
    sent += own.peers->messages() - before;
  });
  CHECK(sent.load() == 3 * 2 * (ranks - 1));
}

TEST_CASE("Messages between processes may be of any size, and of another one in every step",
          "[pipeline][processes]") {
  const Watchdog watchdog("sizes of messages", std::chrono::seconds(60));
  const bool sockets = GENERATE(true, false);
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Rank own(rank, group, "1f1b", 1, sockets);
    for (const int64_t rows : {40, 4000, 11, 8000, 4001, 4}) {
      const auto x = filled({rows, 4}, 3, at::kDouble);
      const auto y = filled({rows, 4}, 4, at::kDouble);
      own.model.zero_grad();
      mse(own.model(x), y).backward();
      own.expected = copies(own.model.gradients());
      own.model.zero_grad();
      own.pipe->step(x, y, mse);
      checks.expect(own.as_expected(), std::to_string(rows) + " rows");
    }
  });
  CHECK(checks.failures().empty());
}

TEST_CASE("Whatever fails in a process, all return within a second and go on",
          "[pipeline][processes][faults]") {
  const QuietLog quiet;
  const Watchdog watchdog("faults in processes", std::chrono::seconds(110));
  const auto wanted = GENERATE(values<Case>({{"1f1b", 2, 1}, {"zb_h1", 2, 1}}));
  const bool out_of_memory = GENERATE(false, true);
  const bool sockets = GENERATE(true, false);
  CAPTURE(wanted.schedule, out_of_memory, sockets);
  Checks checks;
  run_ranks({wanted.ranks}, [&](int rank, const Group& group) {
    Rank own(rank, group, wanted.schedule, wanted.per_rank);
    own.out_of_memory = out_of_memory;
    const auto order = own.pipe->schedule(kMicrobatches);
    const auto fresh = [&] {  // what was learnt of sizes is forgotten
      return std::make_unique<Rank>(rank, group, wanted.schedule, wanted.per_rank, sockets);
    };
    for (int failing = 0; failing < wanted.ranks; ++failing) {
      for (int index = 0; index < std::ssize(order.ranks[failing]); ++index) {
        const auto name = "rank " + std::to_string(failing) + ", action " + std::to_string(index);
        const auto mine = fresh();
        mine->out_of_memory = out_of_memory;
        mine->fail_at = index;
        mine->fail_left = rank == failing ? 1 : 0;
        const auto began = std::chrono::steady_clock::now();
        std::string text;
        int64_t retries = 0;
        try {
          retries = mine->pipe->step(mine->x, mine->y, mse).retries;
        } catch (const RankFailed& error) {
          text = "RankFailed: " + std::string(error.what_without_backtrace());
          checks.expect(error.rank() == failing, name + ": names the rank");
        } catch (const std::exception& error) {
          text = error.what();
        }
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
        checks.expect(took.count() < 1, name + ": returns within a second");
        if (out_of_memory) {
          checks.expect(text.empty() && retries == 1 && mine->as_expected(), name + ": " + text);
          continue;
        }
        checks.expect(text.find(rank == failing ? "planted (in the " : "RankFailed: ") == 0 &&
                          text.find("planted") != std::string::npos,
                      name + ": " + text);
        mine->pipe->step(mine->x, mine->y, mse);
        checks.expect(mine->as_expected(), name + ": the next step");
      }
    }
  });
  CHECK(checks.failures().empty());
}

TEST_CASE("A stage that has its input when it fails leaves no message unsent",
          "[pipeline][processes][faults]") {
  const QuietLog quiet;
  const Watchdog watchdog("faults in stages of processes", std::chrono::seconds(60));
  Checks checks;
  run_ranks({3}, [&](int rank, const Group& group) {
    Rank own(rank, group, "1f1b", 1);
    for (int failing = 0; failing < 3; ++failing) {
      for (int microbatch = 0; microbatch < kMicrobatches; ++microbatch) {
        const auto name =
            "rank " + std::to_string(failing) + ", microbatch " + std::to_string(microbatch);
        own.stage_calls = 0;
        own.fail_in_stage = rank == failing ? microbatch : -1;
        own.model.zero_grad();
        bool right = false;
        try {
          own.pipe->step(own.x, own.y, mse);
        } catch (const RankFailed& error) {
          right = rank != failing && error.rank() == failing;
        } catch (const std::runtime_error& error) {
          right = rank == failing && std::string(error.what()).find("planted (in the ") == 0;
        }
        checks.expect(right, name);
        own.fail_in_stage = -1;
        own.pipe->step(own.x, own.y, mse);
        checks.expect(own.as_expected(), name + ": the next step");
      }
    }
  });
  CHECK(checks.failures().empty());
}

TEST_CASE("What fails at a send or a receive of a schedule's own leaves no other waiting",
          "[pipeline][processes][faults]") {
  const QuietLog quiet;
  const Watchdog watchdog("faults at sends", std::chrono::seconds(60));
  Checks checks;
  const auto schedule =
      pipeline::with_communication(pipeline::make_schedule("1f1b", 2, 1, kMicrobatches));
  run_ranks({2}, [&](int rank, const Group& group) {
    Rank own(rank, group, schedule);
    for (int failing = 0; failing < 2; ++failing) {
      for (int index = 0; index < std::ssize(schedule.ranks[failing]); ++index) {
        const auto name = "rank " + std::to_string(failing) + ", action " + std::to_string(index);
        own.model.zero_grad();
        own.fail_at = index;
        own.fail_left = rank == failing ? 1 : 0;
        std::string text;
        try {
          own.pipe->step(own.x, own.y, mse);
        } catch (const std::exception& error) {
          text = error.what();
        }
        checks.expect(text.find("planted") != std::string::npos, name + ": " + text);
        own.fail_left = 0;
        own.pipe->step(own.x, own.y, mse);
        checks.expect(own.as_expected(), name + ": the next step");
      }
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A step that fits on no rank is refused on all", "[pipeline][processes][faults]") {
  const QuietLog quiet;
  const Watchdog watchdog("no rank");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Rank own(rank, group, "1f1b", 1);
    own.out_of_memory = true;
    own.fail_at = 2;
    own.fail_left = rank == 1 ? 100 : 0;
    bool right = false;
    try {
      own.pipe->step(own.x, own.y, mse);
    } catch (const BatchTooLarge&) {
      right = rank == 1;
    } catch (const RankOutOfMemory& error) {
      right = rank == 0 && error.rank() == 1;
    }
    checks.expect(right, "rank " + std::to_string(rank));
    own.fail_left = 0;
    own.pipe->step(own.x, own.y, mse);
    checks.expect(own.as_expected(), "the next step");
  });
  CHECK(checks.failures().empty());
}

TEST_CASE("Batches of different sizes on the ranks are refused", "[pipeline][processes]") {
  const QuietLog quiet;
  const Watchdog watchdog("different sizes");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Rank own(rank, group, "1f1b", 1);
    const auto rows = rank == 0 ? kRows : kRows - 3;
    std::string text;
    try {
      own.pipe->step(own.x.narrow(0, 0, rows), own.y.narrow(0, 0, rows), mse);
    } catch (const std::exception& error) {
      text = error.what();
    }
    checks.expect(!text.empty(), "rank " + std::to_string(rank) + ": " + text);
    own.pipe->step(own.x, own.y, mse);
    checks.expect(own.as_expected(), "the next step");
  });
  CHECK(checks.failures().empty());
}

}  // namespace test_pipeline_processes
