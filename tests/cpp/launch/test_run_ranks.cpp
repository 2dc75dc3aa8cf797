#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "launch/gloo_group.h"
#include "support/catch.h"
#include "support/counting_backend.h"
#include "support/scoped_env.h"
#include "support/watchdog.h"

#include <brimful/launch/init_from_env.h>
#include <brimful/launch/run_ranks.h>

#include <array>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace test_run_ranks {

using brimful::RanksOptions;
using brimful::run_ranks;
using brimful::test::Call;
using brimful::test::CountedGroup;
using brimful::test::one_rank_world;
using brimful::test::ScopedEnv;
using brimful::test::Watchdog;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

namespace {

double sum_over_ranks(const Group& group, double value) {
  std::vector<at::Tensor> tensors{at::full({3}, value, at::kDouble)};
  group->allreduce(tensors)->wait();
  return tensors[0][2].item<double>();
}

}  // namespace

TEST_CASE("run_ranks gives each rank a group over gloo", "[launch]") {
  const Watchdog watchdog("run_ranks gives each rank a group");
  const int world_size = GENERATE(1, 2, 3);
  std::vector<double> sums(world_size);
  std::vector<std::string> seen(world_size);
  RanksOptions options;
  options.world_size = world_size;
  run_ranks(options, [&](int rank, const Group& group) {
    sums[rank] = sum_over_ranks(group, rank + 1);
    group->getStore()->set("rank" + std::to_string(rank), "here");
    seen[rank] = group->getStore()->get_to_str("rank" + std::to_string((rank + 1) % world_size));
  });
  CHECK(sums == std::vector<double>(world_size, world_size * (world_size + 1) / 2.0));
  CHECK(seen == std::vector<std::string>(world_size, "here"));
}

TEST_CASE("The threads of a group never get SIGPIPE, the program's own keep their mask",
          "[launch]") {
  const auto blocked = [](const std::filesystem::path& task) {
    std::ifstream file(task / "status");
    std::string word;
    while (file >> word && word != "SigBlk:") {
    }
    file >> word;
    return (std::stoull(word, nullptr, 16) >> (SIGPIPE - 1) & 1) != 0;
  };
  const std::filesystem::path tasks = "/proc/self/task";
  std::map<std::string, bool> before;  // some are of groups that end
  for (const auto& task : std::filesystem::directory_iterator(tasks)) {
    before[task.path().filename()] = blocked(task.path());
  }
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto group = brimful::launch::make_gloo_group(
      store, 0, 1, brimful::launch::GlooDevice::loopback, std::chrono::seconds(5));
  int threads = 0;
  for (const auto& task : std::filesystem::directory_iterator(tasks)) {
    const auto known = before.find(task.path().filename());
    threads += known == before.end() ? 1 : 0;
    CHECK(blocked(task.path()) == (known == before.end() || known->second));
  }
  CHECK(threads >= 2);
}

TEST_CASE("run_ranks rethrows the first error, and the other ranks do not wait for the timeout",
          "[launch]") {
  const Watchdog watchdog("run_ranks rethrows the first error");
  const int thrower = GENERATE(0, 1, 2);
  RanksOptions options;
  options.world_size = 3;
  std::array<bool, 3> failed{};
  const auto start = std::chrono::steady_clock::now();
  const auto run = [&] {
    run_ranks(options, [&](int rank, const Group& group) {
      sum_over_ranks(group, 1);
      if (rank == thrower) {
        throw std::runtime_error("planted on one rank");
      }
      try {
        sum_over_ranks(group, 1);
      } catch (const std::exception&) {
        failed[rank] = true;
        throw;
      }
    });
  };
  CHECK_THROWS_WITH(run(), "planted on one rank");
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(failed[rank] == (rank != thrower));
  }
}

TEST_CASE("run_ranks lets a slow rank finish after a fast one has returned", "[launch]") {
  const Watchdog watchdog("run_ranks lets a slow rank finish");
  std::vector<double> received(2);
  run_ranks({}, [&](int rank, const Group& group) {
    std::vector<at::Tensor> tensors{at::full({1 << 12}, rank + 1.0)};
    if (rank == 0) {
      group->send(tensors, 1, 0)->wait();  // sent, not yet received
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    group->recv(tensors, 0, 0)->wait();
    received[rank] = tensors[0].sum().item<double>();
  });
  CHECK(received[1] == 1 << 12);
}

TEST_CASE("run_ranks rejects bad options", "[launch]") {
  const auto nothing = [](int, const Group&) {};
  RanksOptions options;
  options.world_size = GENERATE(0, -1);
  CHECK_THROWS_AS(run_ranks(options, nothing), c10::ValueError);
  options = {};
  options.timeout = std::chrono::milliseconds(0);
  CHECK_THROWS_AS(run_ranks(options, nothing), c10::ValueError);
  CHECK_THROWS_AS(run_ranks(RanksOptions{}, nullptr), c10::ValueError);
}

TEST_CASE("a counted group counts each call of each kind", "[launch]") {
  const Watchdog watchdog("a counted group counts");
  std::vector<std::array<int, 5>> counts(2);
  std::vector<double> sums(2);
  run_ranks({}, [&](int rank, const Group& group) {
    CountedGroup counted(group);
    sum_over_ranks(counted.group, 1);
    counted.backend->reset();
    sums[rank] = sum_over_ranks(counted.group, rank) + sum_over_ranks(counted.group, rank);
    std::vector<at::Tensor> tensors{at::zeros({2})};
    counted.group->broadcast(tensors)->wait();
    std::vector<std::vector<at::Tensor>> gathered{{at::zeros({2}), at::zeros({2})}};
    counted.group->allgather(gathered, tensors)->wait();
    counted.group->barrier()->wait();
    const auto& backend = *counted.backend;
    counts[rank] = {backend.count(Call::allreduce), backend.count(Call::broadcast),
                    backend.count(Call::allgather), backend.count(Call::barrier), backend.total()};
  });
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(sums[rank] == 2);
    CHECK(counts[rank] == std::array<int, 5>{2, 1, 1, 1, 5});
  }
}

TEST_CASE("init_from_env joins the world that the environment describes", "[launch]") {
  const Watchdog watchdog("init_from_env joins the world");
  const ScopedEnv env(one_rank_world());
  const auto first = brimful::init_from_env(std::chrono::seconds(10));
  const auto second =
      brimful::init_from_env(std::chrono::seconds(10));  // same port, a group of its own
  CHECK(first->getRank() == 0);
  CHECK(first->getSize() == 1);
  CHECK(sum_over_ranks(first, 4) == 4);
  CHECK(sum_over_ranks(second, 5) == 5);
  first->getStore()->set("key", "first");
  CHECK_FALSE(second->getStore()->check({"key"}));
}

TEST_CASE("init_from_env names the variable that is wrong", "[launch]") {
  struct Case {
    const char* name;
    const char* value;
    const char* message;
  };
  const auto bad =
      GENERATE(Case{"RANK", nullptr, "not set (name: RANK)"},
               Case{"WORLD_SIZE", "", "not set (name: WORLD_SIZE)"},
               Case{"MASTER_ADDR", nullptr, "not set (name: MASTER_ADDR)"},
               Case{"MASTER_PORT", nullptr, "not set (name: MASTER_PORT)"},
               Case{"RANK", "first", "not a whole number (RANK: first)"},
               Case{"RANK", "1.5", "not a whole number (RANK: 1.5)"},
               Case{"RANK", "-1", "out of range (RANK: -1"},
               Case{"WORLD_SIZE", "0", "out of range (WORLD_SIZE: 0"},
               Case{"WORLD_SIZE", "99999999999", "not a whole number (WORLD_SIZE: 99999999999)"},
               Case{"RANK", "1", "not below the world size (RANK: 1, WORLD_SIZE: 1)"},
               Case{"MASTER_PORT", "65536", "out of range (MASTER_PORT: 65536"});
  auto values = one_rank_world();
  values[bad.name] = bad.value;
  const ScopedEnv env(values);
  CHECK_THROWS_AS(brimful::init_from_env(), c10::ValueError);
  CHECK_THROWS_WITH(brimful::init_from_env(), Catch::Contains(bad.message));
  CHECK_THROWS_AS(brimful::init_from_env(std::chrono::milliseconds(-1)), c10::ValueError);
}

TEST_CASE("ranks that disagree on the world size say so at once", "[launch]") {
  const Watchdog watchdog("world size");
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::array<std::string, 2> errors;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        brimful::launch::make_gloo_group(
            store, rank, 2 + rank, brimful::launch::GlooDevice::loopback, std::chrono::seconds(15));
      } catch (const c10::ValueError& e) {
        errors[rank] = e.what_without_backtrace();
      }
    });
  }
  for (auto& thread : ranks) {
    thread.join();
  }
  CHECK(errors[0].find("rank 0: 2, rank 1: 3") != std::string::npos);
  CHECK(errors[1].find("rank 1: 3, rank 0: 2") != std::string::npos);
}

}  // namespace test_run_ranks
