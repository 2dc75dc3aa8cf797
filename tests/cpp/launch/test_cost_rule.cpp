#include "support/catch.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "launch/cost_rule.h"

namespace test_cost_rule {

using namespace brimful::launch;
using Numbers = std::vector<double>;

namespace {

/// What rows of these costs before each cost, and all.
Numbers before_of(const std::vector<int64_t>& falling) {
  Numbers before{0};
  for (const auto cost : falling) {
    before.push_back(before.back() + static_cast<double>(cost));
  }
  return before;
}

double slowest_of(const Numbers& before, const Takers& takers, const std::vector<size_t>& ends) {
  double slowest = 0;
  size_t begin = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    slowest = std::max(slowest, (before[ends[i]] - before[begin]) * takers.slowness[i]);
    begin = ends[i];
  }
  return slowest;
}

/// The least time of the slowest over all ranges that the bounds allow.
double best_of(const Numbers& before, const Takers& takers, size_t taker, size_t begin) {
  const size_t rows = before.size() - 1;
  if (taker == takers.most.size()) {
    return begin == rows ? 0 : std::numeric_limits<double>::infinity();
  }
  double best = std::numeric_limits<double>::infinity();
  const auto most = begin + static_cast<size_t>(takers.most[taker]);
  for (size_t end = begin + static_cast<size_t>(takers.least); end <= std::min(rows, most); ++end) {
    best = std::min(best, std::max((before[end] - before[begin]) * takers.slowness[taker],
                                   best_of(before, takers, taker + 1, end)));
  }
  return best;
}

struct Seen {
  CostHistory history;
  int64_t place = 0;  ///< the median of the steps behind the first 40
};

/// Of four ranks: `ms` of each load by a true crossover, `late` steps later.
Seen seen(double crossover, int steps, size_t late, uint64_t seed) {
  constexpr size_t kRanks = 4;
  std::mt19937_64 random(seed);
  std::lognormal_distribution<double> jitter(0, 0.02);
  CostHistory history;
  history.slowness.assign(kRanks, 0);
  history.place = linear_place(1024);
  std::deque<Numbers> times(late, Numbers(kRanks, 1.0));
  std::vector<int64_t> places;
  for (int step = 0; step < steps; ++step) {
    std::vector<Load> loads;
    Numbers ms;
    for (size_t rank = 0; rank < kRanks; ++rank) {
      const double length = 16.0 * static_cast<double>(1 + random() % 60);
      loads.push_back({8192, 8192 * length});
      ms.push_back(static_cast<double>(1 + rank) * cost_of(loads.back(), crossover) *
                   jitter(random));
    }
    times.push_back(std::move(ms));
    note_costs(history, std::move(loads), times.front(), 1024);
    times.pop_front();
    if (step >= 40) {
      places.push_back(history.place);
    }
  }
  std::sort(places.begin(), places.end());
  return {std::move(history), places[places.size() / 2]};
}

}  // namespace

TEST_CASE("rows are put in order by falling cost, and stay where costs are equal", "[launch]") {
  std::mt19937_64 random(3);
  for (const int64_t most : {int64_t{1}, int64_t{30}, int64_t{5000}, int64_t{1} << 26}) {
    std::vector<int64_t> costs(400);
    for (auto& cost : costs) {
      cost = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(most));
    }
    std::vector<size_t> expected(costs.size());
    std::iota(expected.begin(), expected.end(), size_t{0});
    std::stable_sort(expected.begin(), expected.end(),
                     [&](size_t a, size_t b) { return costs[a] > costs[b]; });
    CHECK(by_falling_cost(costs, most) == expected);
  }
  CHECK(by_falling_cost({}, 5).empty());
}

TEST_CASE("no ranges have a slowest rank that is faster, to 1/256", "[launch]") {
  std::mt19937_64 random(5);
  for (int i = 0; i < 400; ++i) {
    Takers takers;
    takers.least = static_cast<int64_t>(random() % 3);
    const size_t ranks = 1 + random() % 4;
    int64_t most = 0;
    for (size_t rank = 0; rank < ranks; ++rank) {
      takers.slowness.push_back(0.25 * static_cast<double>(1 + random() % 12));
      takers.most.push_back(takers.least + 1 + static_cast<int64_t>(random() % 8));
      most += takers.most.back();
    }
    const auto least = takers.least * static_cast<int64_t>(ranks);
    std::vector<int64_t> costs(least + static_cast<int64_t>(random() % (most - least + 1)));
    for (auto& cost : costs) {
      cost = 1 + static_cast<int64_t>(random() % 100) * (random() % 3 == 0 ? 20 : 1);
    }
    std::sort(costs.rbegin(), costs.rend());
    const auto before = before_of(costs);
    const auto ends = cut_by_cost(before, takers);
    REQUIRE(ends.size() == ranks);
    CHECK(ends.back() == costs.size());
    size_t begin = 0;
    for (size_t rank = 0; rank < ranks; ++rank) {
      CHECK(ends[rank] >= begin + static_cast<size_t>(takers.least));
      CHECK(ends[rank] <= begin + static_cast<size_t>(takers.most[rank]));
      begin = ends[rank];
    }
    CHECK(slowest_of(before, takers, ends) <=
          best_of(before, takers, 0, 0) * (1 + 1.0 / 256) + 1e-9);
  }
}

TEST_CASE("the crossover and the ranks' speeds are found from times", "[launch]") {
  const size_t late = GENERATE(size_t{0}, size_t{1});  // a device's times are of the step before
  const double crossover = GENERATE(64.0, 300.0, 2000.0);
  for (uint64_t seed = 0; seed < 10; ++seed) {
    const auto [history, place] = seen(crossover, 100, late, seed);
    CHECK(crossover_at(place) > crossover / 2);
    CHECK(crossover_at(place) < crossover * 2);
    for (size_t rank = 0; late == 0 && rank < 4; ++rank) {
      CHECK(std::abs(history.slowness[rank] / history.slowness[0] / static_cast<double>(1 + rank) -
                     1) < 0.25);
    }
  }
}

TEST_CASE("costs that are linear stay so, and the crossover stays within its bounds", "[launch]") {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    const auto linear = seen(1e9, 60, 0, seed);
    CHECK(crossover_at(linear.place) >= 1024 * 4);
    CHECK(linear.history.place <= linear_place(1024));
    CHECK(crossover_at(seen(1e-3, 60, 0, seed).place) < 128);
  }
}

TEST_CASE("times that are not known, and single steps that are slow, change nothing", "[launch]") {
  CostHistory history;
  history.slowness = {0, 0, 0};
  history.place = linear_place(100);
  const double unknown = std::numeric_limits<double>::quiet_NaN();
  const std::vector<Load> loads(3, Load{100, 1000});
  for (int step = 0; step < 8; ++step) {
    const double retried = step == 6 ? 100 : 1;
    note_costs(history, loads, {retried * 200, 50, step < 2 ? 70 : unknown}, 100);
  }
  CHECK(history.place == linear_place(100));
  CHECK(std::abs(history.slowness[0] - 2) < 0.01);
  CHECK(history.slowness[2] == 0);  // of two steps
  CHECK(known_slowness(history)[2] > 0);
  CHECK(known_slowness({{0, 0}, 0, 0, {}, {}}) == Numbers{1, 1});
}

}  // namespace test_cost_rule
