// Control records that go between hosts, beside the buckets.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "reducer/host_connector.h"
#include "reducer/host_group.h"
#include "support/catch.h"
#include "support/checks.h"
#include "support/counting_backend.h"
#include "support/quiet_log.h"
#include "support/trainer.h"
#include "support/watchdog.h"

#include <brimful/launch/run_ranks.h>

#include <bit>
#include <condition_variable>
#include <mutex>
#include <set>

namespace test_between_hosts {

using namespace brimful::test;
using brimful::Fill;
using brimful::run_ranks;
using brimful::Status;

namespace {
constexpr std::chrono::milliseconds kTimeout{5000};
constexpr int64_t kRows = 8;

std::vector<uint8_t> bytes_of(int rank, int number) {
  return {static_cast<uint8_t>(rank + 1), static_cast<uint8_t>(number), 7};
}

c10::intrusive_ptr<CountingBackend> connected(const Group& group) {
  return c10::make_intrusive<CountingBackend>(
      brimful::HostConnector(group, group->getStore()).connect("hosts"));
}

/// Holds what waits for it, for two seconds at most: a test shall fail and not hang.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void close() {
    const std::lock_guard lock(mutex_);
    open_ = false;
  }
  bool is_open() {
    const std::lock_guard lock(mutex_);
    return open_;
  }
  bool wait(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    const auto longest = std::chrono::milliseconds(2000);
    const bool bounded = timeout.count() > 0 && timeout < longest;
    const bool opened =
        changed_.wait_for(lock, bounded ? timeout : longest, [this] { return open_; });
    open_ = opened || !bounded;
    return open_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
};

/// Ends when the gate is open, as far as anyone sees.
class LateWork : public c10d::Work {
 public:
  LateWork(c10::intrusive_ptr<c10d::Work> inner, Gate& gate)
      : inner_(std::move(inner)), gate_(gate) {}
  bool isCompleted() override { return gate_.is_open() && inner_->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override {
    TORCH_CHECK(gate_.wait(timeout), "not in time");
    return inner_->wait(timeout);
  }

 private:
  c10::intrusive_ptr<c10d::Work> inner_;
  Gate& gate_;
};

/// Its sums are late, as those of a device that is behind.
class LateBackend : public CountingBackend {
 public:
  using CountingBackend::CountingBackend;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return c10::make_intrusive<LateWork>(CountingBackend::allreduce(tensors, options), gate);
  }
  Gate gate;
};

struct LateGroup {
  explicit LateGroup(const Group& on)
      : backend(c10::make_intrusive<LateBackend>(on->getBackend(c10::DeviceType::CPU))),
        group(
            c10::make_intrusive<c10d::ProcessGroup>(on->getStore(), on->getRank(), on->getSize())) {
    group->setDefaultBackend(on->getBackendType());
    group->setBackend(c10::DeviceType::CPU, on->getBackendType(), backend);
  }
  c10::intrusive_ptr<LateBackend> backend;
  Group group;
};

brimful::ReducerOptions between_hosts(bool on = true) {
  auto options = tiny_buckets();
  options.between_hosts = on;
  return options;
}

/// A backward and its launches, which say `verdict`.
brimful::Ending ending_of(brimful::DistributedDataParallel<Net>& model, int rank, Status verdict) {
  auto& attempt = model.reducer()->attempt();
  attempt.begin(0);
  attempt.set_order(nullptr, nullptr);
  const auto batch = batch_of(rank, 0, kRows);
  const auto loss = at::mse_loss(model(batch.data), batch.target);
  attempt.begin_piece(true, loss);
  loss.backward();
  brimful::Announcement said;
  said.record.verdict = verdict;
  said.record.weight = rank + 1;
  said.loss_sum = loss.detach().to(at::kDouble);
  attempt.launch_early(Fill::gradients);
  attempt.launch_last(Fill::gradients, said);
  return attempt.finish();
}

/// Two ranks of which each makes a model; how many exchanges between hosts a step makes on each.
std::multiset<int64_t> exchanges_of_a_step(
    const std::function<std::shared_ptr<brimful::Reducer>(int rank, const Group& group)>& step) {
  std::multiset<int64_t> counts;
  std::mutex mutex;
  run_ranks({2}, [&](int rank, const Group& group) {
    const auto reducer = step(rank, group);
    const std::lock_guard lock(mutex);
    counts.insert(reducer->counters().host_exchanges);
  });
  return counts;
}

void plain_step(brimful::DistributedDataParallel<Net>& model, int rank) {
  const auto batch = batch_of(rank, 0, kRows);
  at::mse_loss(model(batch.data), batch.target).backward();
  model->update();
}
}  // namespace

TEST_CASE("An exchange between hosts reaches all ranks in log2 of their number of rounds",
          "[reducer][hosts]") {
  const int world_size = GENERATE(range(1, 10));
  const Watchdog watchdog("rounds between hosts");
  Checks checks;
  run_ranks({world_size}, [&](int rank, const Group& group) {
    const auto backend = connected(group);
    brimful::HostGroup hosts(backend, 3, kTimeout);
    std::vector<brimful::Exchange> exchanges;
    for (int number = 0; number < 3; ++number) {  // all are begun before the first is waited for
      exchanges.push_back(hosts.begin(bytes_of(rank, number)));
    }
    for (int number = 0; number < 3; ++number) {
      exchanges[number].work->wait();
      const auto all = exchanges[number].read();
      checks.expect(std::ssize(all) == world_size, "ranks");
      for (int other = 0; other < world_size; ++other) {
        checks.expect(all[other] == bytes_of(other, number),
                      "exchange " + std::to_string(number) + " of " + std::to_string(world_size) +
                          " ranks: the bytes of rank " + std::to_string(other));
      }
    }
    const int rounds = std::bit_width(static_cast<unsigned>(world_size - 1));
    checks.expect(backend->count(Call::send) == 3 * rounds,
                  std::to_string(backend->count(Call::send)) + " messages of " +
                      std::to_string(world_size) + " ranks");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A rank that leaves ends the others' exchange between hosts", "[reducer][hosts]") {
  const Watchdog watchdog("a rank that leaves the hosts");
  Checks checks;
  run_ranks({3}, [&](int rank, const Group& group) {
    brimful::HostGroup hosts(connected(group), 3, kTimeout);
    if (rank == 1) {
      hosts.abort();
      checks.expect(!hosts.is_whole(), "whole");
    }
    const auto begin = Clock::now();
    const auto exchange = hosts.begin(bytes_of(rank, 0));
    bool failed = false;
    try {
      exchange.work->wait();
    } catch (const std::exception&) {
      failed = true;
    }
    checks.expect(failed, "an exchange without rank 1 succeeds on rank " + std::to_string(rank));
    checks.expect(Clock::now() - begin < kTimeout / 2, "late");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("A verdict is known before the collectives of its step have ended", "[reducer][hosts]") {
  const auto verdict = GENERATE(Status::ok, Status::retry, Status::error);
  const Watchdog watchdog("a verdict beside late sums");
  const QuietLog quiet;
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    const LateGroup late(group);
    brimful::DistributedDataParallel<Net> model(std::make_shared<Net>(), late.group,
                                                between_hosts());
    for (int step = 0; step < 2; ++step) {
      late.backend->gate.close();
      const auto ending = ending_of(model, rank, rank == 0 ? verdict : Status::ok);
      checks.expect(!late.backend->gate.is_open(), "the verdict waited for the sums");
      checks.expect(ending.records[0].verdict == verdict, "verdict");
      checks.expect(ending.records[1].weight == 2, "weight");
      checks.expect(ending.records[1].loss_sum != 0, "loss");
      late.backend->gate.open();
      auto& attempt = model.reducer()->attempt();
      if (verdict == Status::ok) {
        attempt.accept(0.5, true);
        model->update();
      } else {
        attempt.discard();
      }
    }
    checks.expect(model.reducer()->counters().host_exchanges == 2, "exchanges");
  });
  CHECK(checks.failures() == std::vector<std::string>{});
}

TEST_CASE("All ranks connect their hosts, or none", "[reducer][hosts]") {
  const Watchdog watchdog("ranks without hosts");
  const QuietLog quiet;
  const auto make = [](const Group& group, bool on) {
    return brimful::DistributedDataParallel<Net>(std::make_shared<Net>(), group, between_hosts(on));
  };
  CHECK(exchanges_of_a_step([&](int rank, const Group& group) {
          auto model = make(group, true);
          plain_step(model, rank);
          return model.reducer();
        }) == std::multiset<int64_t>{1, 1});
  // Rank 1 does not want to.
  CHECK(exchanges_of_a_step([&](int rank, const Group& group) {
          auto model = make(group, rank == 0);
          plain_step(model, rank);
          return model.reducer();
        }) == std::multiset<int64_t>{0, 0});
  // The group of rank 1 has no store.
  CHECK(exchanges_of_a_step([&](int rank, const Group& group) {
          const auto own = c10::make_intrusive<c10d::ProcessGroup>(
              rank == 1 ? nullptr : group->getStore(), rank, 2);
          own->setDefaultBackend(group->getBackendType());
          own->setBackend(c10::DeviceType::CPU, group->getBackendType(),
                          group->getBackend(c10::DeviceType::CPU));
          auto model = make(own, true);
          plain_step(model, rank);
          return model.reducer();
        }) == std::multiset<int64_t>{0, 0});
  // Rank 1 still has the reducer that connected them, and rank 0 has let go of it: all connect anew.
  CHECK(exchanges_of_a_step([&](int rank, const Group& group) {
          auto first = std::make_unique<brimful::DistributedDataParallel<Net>>(make(group, true));
          plain_step(*first, rank);
          if (rank == 0) {
            first.reset();
          }
          auto model = make(group, true);
          plain_step(model, rank);
          return model.reducer();
        }) == std::multiset<int64_t>{1, 1});
}

}  // namespace test_between_hosts
