#include "support/catch.h"
#include "support/numbered_rows.h"

#include <brimful/launch/global_sampler.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace test_cost_sharing {

using brimful::GlobalSampler;
using brimful::GlobalSamplerOptions;
using brimful::RowCosts;
using namespace brimful::test;
using Step = std::vector<Indices>;  // by rank

namespace {

std::vector<int64_t> lognormal(size_t rows, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::lognormal_distribution<double> lengths(std::log(64), 0.8);
  std::vector<int64_t> costs(rows);
  for (auto& cost : costs) {
    cost = std::clamp<int64_t>(static_cast<int64_t>(lengths(random)), 1, 512);
  }
  return costs;
}

/// The samplers of all ranks, in a loop that looks one batch ahead. A row takes its rank's slowness times n + n * n / crossover.
struct Job {
  RowCosts costs;
  std::vector<double> slowness;
  double crossover = 100;
  std::vector<GlobalSampler> samplers;
  std::vector<Step> steps;  ///< of those that were noted

  Job(RowCosts given, std::vector<double> slowness, const GlobalSamplerOptions& options = {})
      : costs(std::move(given)), slowness(std::move(slowness)) {
    const auto ranks = static_cast<int>(this->slowness.size());
    for (int rank = 0; rank < ranks; ++rank) {
      samplers.emplace_back(costs, rank, ranks, options);
    }
  }

  double time_of(const Indices& rows, size_t rank) const {
    double time = 0;
    for (const auto row : rows) {
      const auto cost = static_cast<double>(costs.of_row[row]);
      time += cost + cost * cost / crossover;
    }
    return slowness[rank] * time;
  }

  /// The slowest rank's time over that of work that can be divided at will.
  double unevenness(const Step& step) const {
    double slowest = 0;
    double all = 0;
    double speed = 0;
    for (size_t rank = 0; rank < step.size(); ++rank) {
      slowest = std::max(slowest, time_of(step[rank], rank));
      all += time_of(step[rank], rank) / slowness[rank];
      speed += 1 / slowness[rank];
    }
    return slowest * speed / all;
  }

  Step fetch(bool& any) {
    Step step;
    any = false;
    for (auto& sampler : samplers) {
      const auto own = sampler.next();
      any = any || own;
      step.push_back(own.value_or(Indices{}));
    }
    return step;
  }

  void note(const Step& step) {
    std::vector<double> work_ms;
    for (size_t rank = 0; rank < step.size(); ++rank) {
      work_ms.push_back(0.5 + 1e-2 * time_of(step[rank], rank));
    }
    for (auto& sampler : samplers) {
      sampler.note(work_ms);
    }
    steps.push_back(step);
  }

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

  int64_t cost_of(const Indices& rows) const {
    return std::accumulate(rows.begin(), rows.end(), int64_t{0},
                           [this](int64_t sum, size_t row) { return sum + costs.of_row[row]; });
  }
};

Indices rows_of(const Step& step) {
  Indices all;
  for (const auto& own : step) {
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

Indices rows_of(const std::vector<Step>& steps) {
  Indices all;
  for (const auto& step : steps) {
    const auto rows = rows_of(step);
    all.insert(all.end(), rows.begin(), rows.end());
  }
  return all;
}

/// Of a step that is not an epoch's last one.
void check_whole(const Job& job, const Step& step, const GlobalSamplerOptions& options) {
  const auto rows = rows_of(step);
  const auto least = step.size() * static_cast<size_t>(options.min_rows);
  CHECK((job.cost_of(rows) <= job.costs.of_batch || rows.size() == least));
  for (size_t rank = 0; rank < step.size(); ++rank) {
    const auto own = static_cast<int64_t>(step[rank].size());
    CHECK(own >= options.min_rows);
    CHECK((options.max_rows.empty() || own <= options.max_rows[rank]));
    CHECK(std::is_sorted(step[rank].begin(), step[rank].end(), [&](size_t a, size_t b) {
      return job.costs.of_row[a] > job.costs.of_row[b];
    }));
  }
}

GlobalSamplerOptions drawn(std::mt19937& random, size_t ranks) {
  GlobalSamplerOptions options;
  options.shuffle = random() % 2 == 0;
  options.lag = 2 + static_cast<int64_t>(random() % 6);
  options.min_rows = 1 + static_cast<int64_t>(random() % 2);
  for (size_t rank = 0; random() % 2 == 0 && rank < ranks; ++rank) {
    options.max_rows.resize(ranks, options.min_rows + 3);
    options.max_rows[rank] += static_cast<int64_t>(random() % 10);
  }
  return options;
}

}  // namespace

TEST_CASE("with costs every row goes to one rank in every epoch", "[launch]") {
  std::mt19937 random(11);
  for (int i = 0; i < 200; ++i) {
    const size_t ranks = 1 + random() % 5;
    std::vector<double> slowness;
    for (size_t rank = 0; rank < ranks; ++rank) {
      slowness.push_back(1.0 + random() % 5);
    }
    const auto options = drawn(random, ranks);
    const auto batch = 100 + static_cast<int64_t>(random() % 4000);
    Job job({lognormal(random() % 300, random()), batch}, slowness, options);
    for (int epoch = 0; epoch < 3; ++epoch) {
      job.steps.clear();
      const auto batches = job.samplers[0].batches();
      const auto of_last_rank = job.samplers.back().batches();
      job.pass();
      CHECK(sorted(rows_of(job.steps)) == up_to(job.costs.of_row.size()));
      CHECK(job.steps.size() == batches);
      CHECK(static_cast<size_t>(std::count_if(
                job.steps.begin(), job.steps.end(),
                [](const Step& step) { return !step.back().empty(); })) == of_last_rank);
      for (size_t step = 0; step + 1 < job.steps.size(); ++step) {
        check_whole(job, job.steps[step], options);
      }
      for (const auto& sampler : job.samplers) {
        CHECK(sampler.state() == job.samplers[0].state());
      }
    }
  }
}

TEST_CASE("A step has as many of the next rows as a batch may cost", "[launch]") {
  Job job({lognormal(400, 3), 2000}, {1, 1}, {.shuffle = false});
  job.pass();
  size_t begin = 0;
  for (const auto& step : job.steps) {
    const auto rows = rows_of(step);
    Indices expected(rows.size());
    std::iota(expected.begin(), expected.end(), begin);
    CHECK(sorted(rows) == expected);
    begin += rows.size();
    CHECK((begin == 400 || job.cost_of(rows) + job.costs.of_row[begin] > 2000));
  }
}

TEST_CASE("rows that cost 1 each are in the batches that they are in without costs", "[launch]") {
  for (const bool drop_last : {false, true}) {
    GlobalSamplerOptions options;
    options.drop_last = drop_last;
    for (const size_t size : {95, 96, 97}) {
      Job job({std::vector<int64_t>(size, 1), 24}, {1, 1, 1}, options);
      job.pass();
      GlobalSampler rows(size, 24, 0, 1, options);
      for (const auto& step : job.steps) {
        CHECK(sorted(rows_of(step)) == sorted(rows.next().value()));
        rows.note(std::vector<double>{1});
      }
      CHECK_FALSE(rows.next());
      CHECK(job.samplers[0].batches() == rows.batches());
    }
  }
}

TEST_CASE("A row that costs more than a batch is in one with a row for each rank", "[launch]") {
  const std::vector<int64_t> costs{1, 1, 1, 1, 1, 50, 1, 1, 1, 1};
  const auto steps = [&](const std::vector<double>& ranks) {
    Job job({costs, 10}, ranks, {.shuffle = false});
    job.pass();
    std::vector<size_t> rows;
    for (const auto& step : job.steps) {
      rows.push_back(rows_of(step).size());
    }
    return rows;
  };
  CHECK(steps({1}) == std::vector<size_t>{5, 1, 4});
  CHECK(steps({1, 1, 1}) == std::vector<size_t>{5, 3, 2});
  Job dropped({costs, 10}, {1, 1, 1}, {.shuffle = false, .drop_last = true});
  dropped.pass();
  CHECK(dropped.steps.size() == 2);
}

TEST_CASE("ranks come to take as long, whatever squares cost", "[launch]") {
  const RowCosts costs{lognormal(20000, 5), 4 * 8000};
  for (const double crossover : {50.0, 200.0, 1e6}) {
    Job job(costs, {1, 1, 1, 2});
    job.crossover = crossover;
    job.pass();
    GlobalSampler by_rows(costs.of_row.size(), 4 * 90, 0, 1);
    double settled = 0;
    double of_rows = 0;
    constexpr size_t kSettling = 24;
    REQUIRE(job.steps.size() > 2 * kSettling);
    const auto steps = static_cast<double>(job.steps.size() - 1 - kSettling);
    for (size_t step = kSettling; step + 1 < job.steps.size(); ++step) {
      settled += job.unevenness(job.steps[step]) / steps;
      // As many rows for each rank as it is fast, of the permutation as it is.
      const auto rows = by_rows.next().value();
      by_rows.note(std::vector<double>{1});
      Step shared;
      for (size_t begin = 0; begin < rows.size(); begin += rows.size() * 2 / 7) {
        const auto first = rows.begin() + static_cast<std::ptrdiff_t>(begin);
        const auto left =
            static_cast<std::ptrdiff_t>(std::min(rows.size() - begin, rows.size() * 2 / 7));
        shared.push_back(Indices(first, first + left));
      }
      shared.resize(4);
      of_rows += job.unevenness(shared) / steps;
    }
    CAPTURE(crossover);
    CHECK(settled < 1.06);
    CHECK(of_rows > 1.1);
  }
}

TEST_CASE("with costs a job that is interrupted goes on as if it had not been", "[launch]") {
  const std::vector<double> slowness{1, 2, 1.5};
  const RowCosts costs{lognormal(600, 9), 2000};
  const auto lag = GENERATE(int64_t{2}, int64_t{5});
  const GlobalSamplerOptions options{.lag = lag};
  Job whole(costs, slowness, options);
  whole.pass();
  const size_t of_epoch = whole.steps.size();
  whole.pass();
  for (size_t at = 0; at <= of_epoch; ++at) {
    Job before(costs, slowness, options);
    before.pass(at);
    REQUIRE(before.steps.size() == at);
    Job after(costs, slowness, options);
    for (auto& sampler : after.samplers) {
      sampler.load_state(before.samplers[1].state());
    }
    CHECK(after.samplers[0].shares() == before.samplers[0].shares());
    CHECK(after.samplers[0].state() == before.samplers[0].state());
    after.pass();
    auto steps = before.steps;
    steps.insert(steps.end(), after.steps.begin(), after.steps.end());
    CHECK(steps ==
          std::vector<Step>(whole.steps.begin(),
                            whole.steps.begin() + static_cast<std::ptrdiff_t>(steps.size())));
    CHECK(steps.size() == (at == of_epoch ? whole.steps.size() : of_epoch));
    before.pass();  // the same without a state: what was fetched and not noted comes again
    CHECK(before.steps == steps);
    CHECK(before.samplers[0].state() == after.samplers[0].state());
  }
}

TEST_CASE("with costs other ranks, lags and batches go on behind the same row", "[launch]") {
  const RowCosts costs{lognormal(600, 9), 3000};
  Job before(costs, {1, 2, 1}, {.lag = 3});
  before.pass(6);
  const auto state = before.samplers[0].state();
  for (const size_t ranks : {1, 2, 3, 7}) {
    const auto lag = ranks == 3 ? int64_t{4} : int64_t{3};
    Job after({costs.of_row, ranks == 2 ? 2000 : 3000}, std::vector<double>(ranks, 1.0),
              {.lag = lag});
    for (auto& sampler : after.samplers) {
      sampler.load_state(state);
    }
    after.pass();
    auto rows = rows_of(before.steps);
    const auto rest = rows_of(after.steps);
    rows.insert(rows.end(), rest.begin(), rest.end());
    CHECK(sorted(rows) == up_to(600));
  }
  for (int rank = 0; rank < 2; ++rank) {
    before.samplers[rank].regroup(rank, 2);
  }
  before.samplers.pop_back();
  before.slowness.pop_back();
  before.pass();
  CHECK(sorted(rows_of(before.steps)) == up_to(600));
  CHECK_THROWS_AS(before.samplers[0].regroup(0, 3001), c10::ValueError);
  CHECK(before.samplers[0].shares().size() == 2);
}

TEST_CASE("shares of a step do not depend on when they are asked for", "[launch]") {
  const RowCosts costs{lognormal(900, 9), 2000};
  const auto steps_of = [&](int64_t ahead) {
    std::vector<GlobalSampler> samplers;
    for (int rank = 0; rank < 2; ++rank) {
      samplers.emplace_back(costs, rank, 2, GlobalSamplerOptions{.lag = 4});
    }
    std::vector<Step> steps;
    size_t noted = 0;
    const auto note = [&] {
      const auto& step = steps[noted++];
      for (auto& sampler : samplers) {
        sampler.note(std::vector<double>{static_cast<double>(step[0].size()),
                                         3.0 * static_cast<double>(step[1].size())});
      }
    };
    while (auto own = samplers[0].next()) {
      steps.push_back({*own, samplers[1].next().value()});
      if (steps.size() - noted == static_cast<size_t>(ahead)) {
        note();
      }
    }
    while (noted < steps.size()) {
      note();
    }
    return steps;
  };
  CHECK(steps_of(1) == steps_of(4));
}

TEST_CASE("What is wrong with costs is refused", "[launch]") {
  const auto make = [](std::vector<int64_t> costs, int64_t batch,
                       const GlobalSamplerOptions& options = {}) {
    return GlobalSampler({std::move(costs), batch}, 0, 2, options);
  };
  CHECK_THROWS_AS(make({1, 0, 2}, 10), c10::ValueError);
  CHECK_THROWS_AS(make({1, -4, 2}, 10), c10::ValueError);
  CHECK_THROWS_AS(make({1, (int64_t{1} << 26) + 1, 2}, 10), c10::ValueError);
  CHECK_THROWS_AS(make({1, 2}, 0), c10::ValueError);
  CHECK_THROWS_AS(make({1, 2}, 1), c10::ValueError);
  CHECK_THROWS_AS(make({1, 2}, std::numeric_limits<int64_t>::max()), c10::ValueError);
  CHECK_THROWS_AS(make({1, 2}, 10, {.min_rows = 0}), c10::ValueError);
  CHECK_THROWS_AS(make({1, 2}, 10, {.max_rows = {3}}), c10::ValueError);
  CHECK_THROWS_AS(make({1, 2}, 10, {.max_rows = {3, 0}}), c10::ValueError);
  CHECK(make({}, 10).batches() == 0);
  CHECK(make({}, 10).shares() == std::vector<int64_t>{0, 0});
  auto sampler = make({1, 2, 3}, 10);
  const auto state = sampler.state();
  GlobalSampler rows(3, 2, 0, 2);
  CHECK_THROWS_AS(rows.load_state(state), c10::ValueError);
  CHECK_THROWS_AS(sampler.load_state(rows.state()), c10::ValueError);
  CHECK_THROWS_AS(make({1, 2, 4}, 10).load_state(state), c10::ValueError);
  for (const auto& [name, values] : state) {
    auto damaged = state;
    damaged.erase(name);
    CHECK_THROWS_AS(sampler.load_state(damaged), c10::ValueError);
    damaged[name] = {std::numeric_limits<double>::quiet_NaN()};
    if (name != "split") {  // of another split nothing is read
      CHECK_THROWS_AS(sampler.load_state(damaged), c10::ValueError);
    }
  }
  CHECK(sampler.state() == state);
}

}  // namespace test_cost_sharing
