#include <torch/data/dataloader.h>
#include <torch/data/datasets/map.h>
#include <torch/data/transforms/stack.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "support/catch.h"
#include "support/checks.h"
#include "support/numbered_rows.h"
#include "support/trainer.h"
#include "support/watchdog.h"

#include <brimful/launch/global_sampler.h>
#include <brimful/launch/run_ranks.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <vector>

namespace test_global_sampler {

using brimful::GlobalSampler;
using brimful::GlobalSamplerOptions;
using namespace brimful::test;

namespace {

/// The samplers of all ranks, in a loop that looks one batch ahead.
struct Job {
  std::vector<GlobalSampler> samplers;
  std::vector<double> ms_per_row;
  std::vector<std::vector<Indices>> steps;  ///< by step and rank, of those that were noted

  Job(size_t size, size_t batch_size, std::vector<double> ms_per_row,
      const GlobalSamplerOptions& options = {})
      : ms_per_row(std::move(ms_per_row)) {
    const auto ranks = static_cast<int>(this->ms_per_row.size());
    for (int rank = 0; rank < ranks; ++rank) {
      samplers.emplace_back(size, batch_size, rank, ranks, options);
    }
  }

  std::vector<Indices> fetch(bool& any) {
    std::vector<Indices> batch;
    any = false;
    for (auto& sampler : samplers) {
      const auto own = sampler.next();
      any = any || own;
      batch.push_back(own.value_or(Indices{}));
    }
    return batch;
  }

  void note(const std::vector<Indices>& batch) {
    std::vector<double> work_ms;
    for (size_t rank = 0; rank < batch.size(); ++rank) {
      work_ms.push_back(0.5 + ms_per_row[rank] * static_cast<double>(batch[rank].size()));
    }
    for (auto& sampler : samplers) {
      sampler.note(work_ms);
    }
    steps.push_back(batch);
  }

  /// Runs at most so many steps of a pass.
  void pass(size_t most = std::numeric_limits<size_t>::max()) {
    for (auto& sampler : samplers) {
      sampler.reset();
    }
    bool any = false;
    auto following = fetch(any);
    while (any && most-- > 0) {
      const auto current = following;
      following = fetch(any);
      note(current);
    }
  }
};

Indices rows_of(const std::vector<std::vector<Indices>>& steps) {
  Indices all;
  for (const auto& step : steps) {
    for (const auto& own : step) {
      all.insert(all.end(), own.begin(), own.end());
    }
  }
  return all;
}

}  // namespace

TEST_CASE("every row goes to exactly one rank in every epoch, whatever the shares", "[launch]") {
  std::mt19937 random(11);
  for (int i = 0; i < 300; ++i) {
    const size_t ranks = 1 + random() % 5;
    const size_t size = random() % 200;
    const size_t batch_size = ranks + random() % 40;
    std::vector<double> speeds;
    for (size_t rank = 0; rank < ranks; ++rank) {
      speeds.push_back(1.0 + random() % 5);
    }
    GlobalSamplerOptions options;
    options.shuffle = random() % 2 == 0;
    options.drop_last = random() % 4 == 0;
    options.lag = 2 + static_cast<int64_t>(random() % 6);
    Job job(size, batch_size, speeds, options);
    for (int epoch = 0; epoch < 3; ++epoch) {
      job.steps.clear();
      job.pass();
      const auto rows = rows_of(job.steps);
      if (options.drop_last) {
        CHECK(rows.size() == size / batch_size * batch_size);
        CHECK(std::set<size_t>(rows.begin(), rows.end()).size() == rows.size());
      } else {
        CHECK(sorted(rows) == up_to(size));
      }
      CHECK((options.shuffle || rows == up_to(rows.size())));
      for (size_t step = 0; step + 1 < job.steps.size(); ++step) {
        for (const auto& own : job.steps[step]) {
          CHECK(!own.empty());
        }
      }
      for (size_t rank = 0; rank < ranks; ++rank) {
        const auto had = std::count_if(job.steps.begin(), job.steps.end(),
                                       [&](const auto& step) { return !step[rank].empty(); });
        CHECK(static_cast<size_t>(had) == job.samplers[rank].batches());
      }
    }
  }
}

TEST_CASE("a rank half as fast takes half as many rows, of the same batches", "[launch]") {
  Job job(96 * 20, 96, {1, 2});
  job.pass();
  CHECK(job.steps.front()[0].size() == 48);
  CHECK(job.steps.back()[0].size() >= 63);
  CHECK(job.steps.back()[0].size() <= 65);
  Job alike(96 * 20, 96, {1});
  alike.pass();
  for (size_t step = 0; step < job.steps.size(); ++step) {
    CHECK(rows_of({job.steps[step]}) == alike.steps[step][0]);
  }
  GlobalSamplerOptions capped;
  capped.max_rows = {50, 96};
  Job bounded(96 * 20, 96, {1, 2}, capped);
  bounded.pass();
  CHECK(bounded.samplers[0].shares() ==
        std::vector<int64_t>{48, 48});  // two rows more gain too little
  capped.max_rows = {56, 96};
  Job wider(96 * 20, 96, {1, 2}, capped);
  wider.pass();
  CHECK(wider.samplers[0].shares() == std::vector<int64_t>{56, 40});
}

TEST_CASE("epochs have orders of their own, and set_epoch chooses one", "[launch]") {
  Job job(40, 8, {1, 1});
  job.pass();
  const auto first = job.steps;
  CHECK(job.samplers[0].epoch() == 1);
  job.steps.clear();
  job.pass();
  CHECK(job.steps != first);
  for (auto& sampler : job.samplers) {
    sampler.set_epoch(0);
  }
  job.steps.clear();
  job.pass();
  CHECK(job.steps == first);
}

TEST_CASE("a job that is interrupted goes on as if it had not been", "[launch]") {
  const auto at = GENERATE(size_t{0}, size_t{1}, size_t{4}, size_t{9}, size_t{20}, size_t{25});
  const std::vector<double> speeds{1, 2, 1.5};
  GlobalSamplerOptions options;
  options.lag = 3;
  Job whole(515, 24, speeds, options);
  Job before(515, 24, speeds, options);
  for (int epoch = 0; epoch < 2; ++epoch) {
    whole.pass();
  }
  if (at < 22) {
    before.pass(at);
  } else {
    before.pass();
    before.pass(at - 22);
  }
  REQUIRE(before.steps.size() == at);
  Job after(515, 24, speeds, options);
  for (size_t rank = 0; rank < speeds.size(); ++rank) {
    CHECK(before.samplers[rank].state() == before.samplers[0].state());
    after.samplers[rank].load_state(before.samplers[0].state());
  }
  after.pass();
  if (at < 22) {
    after.pass();
  }
  auto steps = before.steps;
  steps.insert(steps.end(), after.steps.begin(), after.steps.end());
  CHECK(steps == whole.steps);
  before.pass();  // the same without a state: what was fetched and not noted comes again
  if (at < 22) {
    before.pass();
  }
  CHECK(before.steps == whole.steps);
}

TEST_CASE("another number of ranks goes on in the same batches", "[launch]") {
  Job whole(500, 24, {1});
  whole.pass();
  Job before(500, 24, {1, 2, 1});
  before.pass(7);
  Job after(500, 24, {1, 3});
  for (auto& sampler : after.samplers) {
    sampler.load_state(before.samplers[0].state());
  }
  CHECK(after.samplers[0].shares() == std::vector<int64_t>{12, 12});
  after.pass();
  auto rows = rows_of(before.steps);
  const auto rest = rows_of(after.steps);
  rows.insert(rows.end(), rest.begin(), rest.end());
  CHECK(rows == rows_of(whole.steps));
}

TEST_CASE("a sampler says what is wrong with it", "[launch]") {
  CHECK_THROWS_AS(GlobalSampler(10, 4, 2, 2), c10::ValueError);
  CHECK_THROWS_AS(GlobalSampler(10, 4, -1, 2), c10::ValueError);
  CHECK_THROWS_AS(GlobalSampler(10, 4, 0, 0), c10::ValueError);
  CHECK_THROWS_AS(GlobalSampler(10, 1, 0, 2), c10::ValueError);
  CHECK_THROWS_AS(GlobalSampler(10, 4, 0, 2, {.lag = 0}), c10::ValueError);
  CHECK_THROWS_AS(GlobalSampler(10, 4, 0, 2, {.min_rows = 3}), c10::ValueError);
  CHECK_THROWS_AS(GlobalSampler(10, 4, 0, 2, {.max_rows = {1, 2}}), c10::ValueError);
  CHECK_THROWS_AS(GlobalSampler(10, 4, 0, 2, {.max_rows = {4}}), c10::ValueError);
  GlobalSampler sampler(10, 2, 0, 2, {.lag = 2});
  CHECK_THROWS_AS(sampler.reset(11), c10::ValueError);
  CHECK_THROWS_AS(sampler.note(std::vector<double>{1, 1}), c10::ValueError);  // of which step?
  sampler.next();
  sampler.next();
  CHECK_THROWS_AS(sampler.next(), c10::ValueError);  // follows an outcome that was not noted
  CHECK_THROWS_AS(sampler.note(std::vector<double>{1, 1, 1}), c10::ValueError);
  sampler.note(std::vector<double>{1, 1});
  CHECK(sampler.next());
  const auto state = sampler.state();
  GlobalSampler other(11, 2, 0, 2);
  CHECK_THROWS_AS(other.load_state(state), c10::ValueError);
  GlobalSampler seeded(10, 2, 0, 2, {.seed = 1});
  CHECK_THROWS_AS(seeded.load_state(state), c10::ValueError);
  CHECK_THROWS_AS(sampler.load_state({}), c10::ValueError);
}

TEST_CASE("a data loader's copy of a sampler follows what the program notes", "[launch]") {
  const Watchdog watchdog("shares of data loaders");
  constexpr size_t kSamples = 50;
  constexpr int kRanks = 3;
  const size_t workers = GENERATE(size_t{0}, size_t{2});
  std::mutex mutex;
  Indices seen;
  double weight = 0;
  const std::vector<c10::Device> devices(kRanks, c10::Device(c10::DeviceType::CPU));
  brimful::run_ranks(devices, [&](int rank, c10::Device /*device*/, const Group& group) {
    brimful::DistributedDataParallel<Net> model(std::make_shared<Net>(false), group);
    brimful::BatchSizer sizer(model);
    GlobalSamplerOptions options;
    options.lag = static_cast<int64_t>(2 * workers + 3);
    GlobalSampler sampler(kSamples, 8, rank, kRanks, options);
    auto loader = torch::data::make_data_loader(
        NumberedRows(kSamples).map(torch::data::transforms::Stack<>()), sampler,
        torch::data::DataLoaderOptions(1).workers(workers));
    const auto loss_fn = [&](const torch::data::Example<>& piece) {
      return at::mse_loss(model(piece.data), piece.target);
    };
    for (const auto& batch : sizer.batches(*loader)) {
      const auto outcome = sizer.step(batch, loss_fn);
      sampler.note(outcome);
      const std::lock_guard lock(mutex);
      weight += rank == 0 ? outcome.weight.value() : 0;
      for (int64_t i = 0; batch && i < batch->data.size(0); ++i) {
        seen.push_back(batch->data[i][0].item<int64_t>());
      }
      model->update();
    }
  });
  CHECK(sorted(seen) == up_to(kSamples));
  CHECK(weight == kSamples);
}

TEST_CASE("What was handed out and not noted is cut anew among other ranks", "[launch]") {
  Job before(40, 8, {1, 1, 1});
  const auto step = [](Job& job) {
    bool any = false;
    auto batch = job.fetch(any);
    REQUIRE(any);
    return batch;
  };
  before.note(step(before));
  const auto lost = step(before);  // a rank dies in it
  step(before);                    // and one was fetched ahead
  Job after(40, 8, {1, 1});
  for (int rank = 0; rank < 2; ++rank) {
    auto sampler = before.samplers[rank == 0 ? 0 : 2];
    sampler.regroup(rank, 2);
    after.samplers[rank] = sampler;
  }
  const auto again = step(after);
  CHECK(again[0].size() == 4);
  Indices rows;
  Indices rows_again;
  for (const auto& of_rank : lost) {
    rows.insert(rows.end(), of_rank.begin(), of_rank.end());
  }
  for (const auto& of_rank : again) {
    rows_again.insert(rows_again.end(), of_rank.begin(), of_rank.end());
  }
  CHECK(rows == rows_again);
  auto& sampler = after.samplers[0];
  CHECK_THROWS_AS(sampler.regroup(2, 2), c10::ValueError);
  CHECK_THROWS_AS(sampler.regroup(0, 9), c10::ValueError);
  CHECK(sampler.shares() == std::vector<int64_t>{4, 4});
}

TEST_CASE("A rank without rows in a step knows that there is one", "[launch]") {
  GlobalSampler sampler(5, 4, 1, 2);
  CHECK(sampler.next_step()->size() == 2);
  sampler.note(std::vector<double>{1, 1});
  const auto last = sampler.next_step();
  REQUIRE(last);
  CHECK(last->empty());
  sampler.note(std::vector<double>{1, 1});
  CHECK(sampler.epoch() == 1);
}

}  // namespace test_global_sampler
