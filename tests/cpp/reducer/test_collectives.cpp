// A clean step makes as many collectives as it has buckets, and waits once.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "reducer/whole_path.h"
#include "support/catch.h"
#include "support/checks.h"
#include "support/counting_backend.h"
#include "support/trainer.h"
#include "support/watchdog.h"

#include <brimful/launch/run_ranks.h>
#include <brimful/log.h>
#include <brimful/step/stop.h>

#include <csignal>

namespace test_collectives {

using namespace brimful::test;
using brimful::BatchSizerOptions;
using brimful::Reducer;
using brimful::run_ranks;

namespace {

constexpr int kSteps = 3;
constexpr int64_t kRows = 8;

/// Counts from construction to expect().
class Count {
 public:
  Count(const CountedGroup& group, const Reducer& reducer)
      : backend_(*group.backend), reducer_(reducer), before_(reducer.counters()) {
    backend_.reset();
  }
  void expect(Checks& checks, const std::string& what, int64_t steps) const {
    const auto counters = reducer_.counters();
    const int64_t calls = steps * reducer_.buckets();
    checks.expect(backend_.count(Call::allreduce) == calls,
                  what + ": allreduces: " + std::to_string(backend_.count(Call::allreduce)));
    checks.expect(backend_.total() == calls,
                  what + ": calls of all kinds: " + std::to_string(backend_.total()));
    checks.expect(counters.launches - before_.launches == calls, what + ": launches");
    checks.expect(counters.host_waits - before_.host_waits == steps, what + ": host waits");
    checks.expect(counters.exchanges == before_.exchanges, what + ": exchanges");
  }

 private:
  CountingBackend& backend_;
  const Reducer& reducer_;
  Reducer::Counters before_;
};

}  // namespace

TEST_CASE("A clean step makes as many collectives as it has buckets", "[reducer][collectives]") {
  const int world_size = GENERATE(1, 2, 3);
  const double cap_mb = GENERATE(24.0 / (1 << 20), 25.0);
  const Watchdog watchdog("collectives of a clean step");
  Checks checks;
  run_ranks({world_size}, [&](int rank, const Group& group) {
    const CountedGroup counted(group);
    brimful::ReducerOptions buckets;
    buckets.bucket_cap_mb = buckets.first_bucket_cap_mb = cap_mb;
    const brimful::WholePath whole_path;

    {
      brimful::DistributedDataParallel<Net> plain(std::make_shared<Net>(), counted.group, buckets);
      const Count in_plain_loop(counted, *plain.reducer());
      for (int step = 0; step < kSteps; ++step) {
        const auto batch = batch_of(rank, step, kRows);
        at::mse_loss(plain(batch.data), batch.target).backward();
        plain->update();
      }
      in_plain_loop.expect(checks, "plain loop", kSteps);
    }

    BatchSizerOptions options;
    options.pieces = 2;
    Trainer trainer(counted.group, std::make_shared<Net>(), options, buckets);
    checks.expect(trainer.model.reducer()->buckets() == (cap_mb < 1 ? 6 : 1), "buckets");
    trainer.step(batch_of(rank, 0, kRows));  // begins with an exchange
    checks.expect(trainer.model.reducer()->counters().exchanges == 1, "one exchange at the start");
    const Count in_sizer(counted, *trainer.model.reducer());
    for (int step = 0; step < kSteps; ++step) {
      const bool without_data = step == 1 && rank == 0;
      trainer.step(without_data ? std::nullopt : std::optional(batch_of(rank, step, kRows + rank)));
    }
    in_sizer.expect(checks, "sizer", kSteps);
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Several reducers agree on whose step it is, a lone one on nothing",
          "[reducer][collectives]") {
  const Watchdog watchdog("collectives of two models");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    const CountedGroup counted(group);
    const auto batch = batch_of(rank, 0, kRows);
    const auto expect = [&](int turns, const std::string& what) {
      const int found = counted.backend->count(Call::allgather);
      checks.expect(found == turns, what + ": " + std::to_string(found));
      counted.backend->reset();
    };
    brimful::DistributedDataParallel<Net> first(std::make_shared<Net>(), counted.group);
    auto second = std::make_unique<brimful::DistributedDataParallel<Net>>(std::make_shared<Net>(),
                                                                          counted.group);
    counted.backend->reset();
    const auto step = [&](auto& model) {
      at::mse_loss(model(batch.data), batch.target).backward();
      model->update();
    };
    for (int i = 0; i < 2; ++i) {
      step(first);
      expect(2, "the beginning and the end of a backward");
      step(*second);
      expect(2, "the other's");
    }
    (at::mse_loss(first(batch.data), batch.target) +
     at::mse_loss((*second)(batch.data), batch.target))
        .backward();
    expect(3, "two beginnings and an end");
    second.reset();
    step(first);
    expect(2, "the ranks learn that the other one has died");
    step(first);
    expect(0, "a lone reducer");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("Rows of sparse gradients follow in one collective each", "[reducer][collectives]") {
  const Watchdog watchdog("collectives of sparse gradients");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    const CountedGroup counted(group);
    const auto tables = std::vector<at::Tensor>{at::zeros({5, 2}).set_requires_grad(true),
                                                at::zeros({5}).set_requires_grad(true),
                                                at::zeros({2}).set_requires_grad(true)};
    brimful::ReducerOptions options;
    options.sparse = {true, true, false};
    const auto reducer = Reducer::create(tables, {}, counted.group, options);
    for (const bool used : {true, false}) {
      counted.backend->reset();
      auto loss = tables[2].sum();
      if (used) {
        const auto row = at::full({1}, rank, at::kLong);
        loss = loss + at::embedding(tables[0], row, -1, false, true).sum();
      }
      loss.backward();
      checks.expect(counted.backend->count(Call::allreduce) == 1, "the dense bucket");
      checks.expect(counted.backend->count(Call::allgather) == (used ? 1 : 0), "rows");
      checks.expect(counted.backend->total() == (used ? 2 : 1), "calls");
      for (const auto& table : tables) {
        table.mutable_grad().reset();
      }
    }
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("No collective takes along what Python left in its thread", "[reducer][collectives]") {
  const Watchdog watchdog("objects of Python in threads");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    using at::impl::ThreadLocalPythonObjects;
    const auto before = ThreadLocalPythonObjects::get_state();
    ThreadLocalPythonObjects::set(kLeftByPython, nullptr);
    const CountedGroup counted(group);
    Trainer trainer(counted.group);
    trainer.step(batch_of(rank, 0, kRows));
    const auto table = at::zeros({5, 2}).set_requires_grad(true);
    brimful::ReducerOptions options;
    options.sparse = {true};
    const auto reducer = Reducer::create({table}, {}, counted.group, options);
    at::embedding(table, at::zeros({1}, at::kLong), -1, false, true).sum().backward();
    checks.expect(counted.backend->total() > 0, "calls");
    checks.expect(counted.backend->with_python() == 0, "calls with objects of Python");
    checks.expect(ThreadLocalPythonObjects::contains(kLeftByPython), "what Python left is lost");
    ThreadLocalPythonObjects::set_state(before);
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A single rank makes no collective after its first", "[reducer][collectives]") {
  run_ranks({1}, [&](int rank, const Group& group) {
    const CountedGroup counted(group);
    Trainer trainer(counted.group);
    trainer.step(batch_of(rank, 0, kRows));
    counted.backend->reset();
    const auto before = trainer.state();
    trainer.step(batch_of(rank, 1, kRows));
    CHECK_FALSE(at::equal(before[0], trainer.state()[0]));
    brimful::DistributedDataParallel<Net> plain(std::make_shared<Net>(), counted.group);
    counted.backend->reset();
    const auto batch = batch_of(rank, 2, kRows);
    at::mse_loss(plain(batch.data), batch.target).backward();
    CHECK(plain->parameters()[0].grad().defined());
    CHECK(counted.backend->total() == 0);
  });
}

TEST_CASE("A loop over batches makes one exchange and no other call", "[sizer][collectives]") {
  const Watchdog watchdog("collectives of a loop");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    const CountedGroup counted(group);
    Trainer trainer(counted.group);
    std::vector<Batch> loader;
    for (int i = 0; i < 1 + 2 * rank; ++i) {
      loader.push_back(batch_of(rank, i, kRows));
    }
    counted.backend->reset();
    for (auto& batch : trainer.sizer.batches(loader)) {
      trainer.sizer.step(batch, [&](const Batch& piece) {
        return at::mse_loss(trainer.model(piece.data), piece.target);
      });
      trainer.model->update();
    }
    const auto expected = 3 * trainer.model.reducer()->buckets() + 1;
    checks.expect(counted.backend->total() == expected,
                  "calls: " + std::to_string(counted.backend->total()));
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A loop that is asked to stop ends on all ranks, and makes no call for it",
          "[sizer][collectives]") {
  constexpr int64_t kAt = 1;
  const Watchdog watchdog("a request to stop");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    const CountedGroup counted(group);
    Trainer trainer(counted.group);
    std::vector<Batch> loader(9, batch_of(rank, 0, kRows));
    counted.backend->reset();
    int64_t steps = 0;
    for (auto& batch : trainer.sizer.batches(loader)) {
      if (steps == kAt && rank == 1) {
        brimful::request_stop(SIGTERM);
      }
      const auto outcome = trainer.step(batch);
      ++steps;
      checks.expect(outcome.stop == outcome.last, "the outcome");
    }
    checks.expect(steps == kAt || steps == kAt + 1, "steps: " + std::to_string(steps));
    const auto expected = steps * trainer.model.reducer()->buckets() + 1;
    checks.expect(counted.backend->total() == expected,
                  "calls: " + std::to_string(counted.backend->total()));
    checks.expect(brimful::stop_exit_code() == 128 + SIGTERM, "the exit code");
  });
  brimful::clear_stop();
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A retry alone costs no call, one of all ranks a step's", "[sizer][collectives]") {
  brimful::set_log_level(brimful::LogLevel::error);
  const bool alone = GENERATE(true, false);
  const Watchdog watchdog("collectives of a retry");
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    const CountedGroup counted(group);
    Trainer trainer(counted.group);
    trainer.step(batch_of(rank, 0, kRows));
    auto& fault = *trainer.model->fault;
    fault.at = alone ? Fault::At::forward : Fault::At::gradient;
    fault.kind = Fault::Kind::out_of_memory;
    fault.armed = rank == 1;
    const Count count(counted, *trainer.model.reducer());
    trainer.step(batch_of(rank, 1, kRows));
    count.expect(checks, alone ? "alone" : "all", alone ? 1 : 2);
  });
  brimful::set_log_level(brimful::LogLevel::warning);
  CHECK(checks.failures() == std::vector<std::string>{});
}

}  // namespace test_collectives
