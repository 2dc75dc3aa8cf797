#include <torch/data/dataloader.h>
#include <torch/data/datasets/map.h>
#include <torch/data/samplers/distributed.h>
#include <torch/data/transforms/stack.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include "support/catch.h"
#include "support/checks.h"
#include "support/numbered_rows.h"
#include "support/trainer.h"
#include "support/watchdog.h"

#include <brimful/launch/distributed_sampler.h>
#include <brimful/launch/run_ranks.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <vector>

namespace test_distributed_sampler {

using brimful::DistributedSampler;
using brimful::DistributedSamplerOptions;
using namespace brimful::test;

namespace {

/// What is left of the epoch, in batches of `batch_size`.
template <typename Sampler>
Indices drain(Sampler& sampler, size_t batch_size = 4) {
  Indices all;
  while (const auto batch = sampler.next(batch_size)) {
    all.insert(all.end(), batch->begin(), batch->end());
  }
  return all;
}

Indices torch_sampler_epoch(size_t epoch, bool allow_duplicates) {
  Indices drawn;
  for (size_t rank = 0; rank < 3; ++rank) {
    torch::data::samplers::DistributedRandomSampler sampler(10, 3, rank, allow_duplicates);
    sampler.set_epoch(epoch);
    sampler.reset();
    const auto own = drain(sampler);
    drawn.insert(drawn.end(), own.begin(), own.end());
  }
  return sorted(drawn);
}

}  // namespace

TEST_CASE("LibTorch's distributed sampler leaves samples out or draws them twice", "[launch]") {
  // The reason for ours. Where this fails, LibTorch's may have come to serve.
  for (size_t epoch = 0; epoch < 20; ++epoch) {
    CHECK(torch_sampler_epoch(epoch, false) == up_to(9));  // the same sample in every epoch
    CHECK(torch_sampler_epoch(epoch, true) == Indices{0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  }
}

TEST_CASE("every sample goes to exactly one rank in every epoch", "[launch]") {
  const auto size = GENERATE(size_t{0}, size_t{1}, size_t{2}, size_t{10}, size_t{97});
  const int world_size = GENERATE(1, 2, 3, 4);
  const bool shuffle = GENERATE(false, true);
  std::vector<DistributedSampler> samplers;
  for (int rank = 0; rank < world_size; ++rank) {
    samplers.emplace_back(size, rank, world_size, DistributedSamplerOptions{shuffle, 3});
  }
  for (int epoch = 0; epoch < 3; ++epoch) {
    Indices all;
    for (auto& sampler : samplers) {
      sampler.reset();
      const auto own = drain(sampler);
      CHECK(own.size() >= size / world_size);
      CHECK(own.size() <= (size + world_size - 1) / world_size);
      all.insert(all.end(), own.begin(), own.end());
    }
    CHECK(sorted(all) == up_to(size));
  }
}

TEST_CASE("a sampler shuffles by epoch and seed, and goes on from a given epoch", "[launch]") {
  const auto epochs = [](uint64_t seed) {
    DistributedSampler sampler(50, 0, 1, {true, seed});
    std::vector<Indices> orders{drain(sampler)};  // without reset: the first epoch
    sampler.reset();
    sampler.reset(20);
    orders.push_back(drain(sampler));
    sampler.set_epoch(1);
    sampler.reset(50);
    orders.push_back(drain(sampler));
    sampler.set_epoch(uint64_t{1} << 32);
    sampler.reset();
    orders.push_back(drain(sampler));
    return orders;
  };
  const auto orders = epochs(0);
  CHECK(orders == epochs(0));
  CHECK(orders[0] != up_to(50));
  CHECK(sorted(orders[1]) == up_to(20));
  CHECK(orders[2] != orders[0]);
  CHECK(orders[3] != orders[0]);
  CHECK(orders[0] != epochs(1)[0]);
  CHECK(orders[0] != epochs(uint64_t{1} << 32)[0]);
  DistributedSampler second(50, 0, 1);
  drain(second);
  second.reset();
  CHECK(drain(second) == orders[2]);
}

TEST_CASE("a sampler refuses a rank outside its world and empty batches", "[launch]") {
  CHECK_THROWS_AS(DistributedSampler(10, 2, 2), c10::ValueError);
  CHECK_THROWS_AS(DistributedSampler(10, -1, 2), c10::ValueError);
  CHECK_THROWS_AS(DistributedSampler(10, 0, 0), c10::ValueError);
  DistributedSampler sampler(10, 0, 1);
  CHECK_THROWS_AS(sampler.next(0), c10::ValueError);
}

TEST_CASE("an uneven loop over a data loader trains on every sample once an epoch", "[launch]") {
  const Watchdog watchdog("uneven data loaders");
  constexpr size_t kSamples = 10;
  constexpr int kRanks = 3;
  constexpr int kEpochs = 2;
  std::mutex mutex;
  std::vector<Indices> seen(kEpochs);
  std::vector<std::vector<Indices>> orders(kRanks, std::vector<Indices>(kEpochs));
  std::vector<double> weights(kEpochs);
  const std::vector<c10::Device> devices(kRanks, c10::Device(c10::DeviceType::CPU));
  brimful::run_ranks(devices, [&](int rank, c10::Device /*device*/, const Group& group) {
    brimful::DistributedDataParallel<Net> model(std::make_shared<Net>(false), group);
    brimful::BatchSizer sizer(model);
    auto loader = torch::data::make_data_loader(
        NumberedRows(kSamples).map(torch::data::transforms::Stack<>()),
        DistributedSampler(kSamples, rank, kRanks), torch::data::DataLoaderOptions(1));
    const auto loss_fn = [&](const torch::data::Example<>& piece) {
      const std::lock_guard lock(mutex);
      return at::mse_loss(model(piece.data), piece.target);
    };
    for (int epoch = 0; epoch < kEpochs; ++epoch) {
      for (const auto& batch : sizer.batches(*loader)) {
        const auto outcome = sizer.step(batch, loss_fn);
        const std::lock_guard lock(mutex);
        weights[epoch] += rank == 0 ? outcome.weight.value() : 0;
        if (batch) {
          orders[rank][epoch].push_back(batch->data[0][0].item<int64_t>());
        }
        model->update();
      }
    }
    const std::lock_guard lock(mutex);
    for (int epoch = 0; epoch < kEpochs; ++epoch) {
      seen[epoch].insert(seen[epoch].end(), orders[rank][epoch].begin(), orders[rank][epoch].end());
    }
  });
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    CHECK(sorted(seen[epoch]) == up_to(kSamples));
    CHECK(weights[epoch] == kSamples);
    CHECK(orders[0][epoch].size() == 4);
    CHECK(orders[1][epoch].size() == 3);
  }
  CHECK(orders[0][0] != orders[0][1]);
}

}  // namespace test_distributed_sampler
