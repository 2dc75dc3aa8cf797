#include <brimful/pipeline/balance.h>
#include <c10/util/Exception.h>
#include "support/catch.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace test_balance {

using brimful::pipeline::balanced;

namespace {
double costliest(const std::vector<double>& costs, const std::vector<int64_t>& counts) {
  double most = 0;
  size_t layer = 0;
  for (const auto count : counts) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      sum += costs.at(layer++);
    }
    most = std::max(most, sum);
  }
  REQUIRE(layer == costs.size());
  return most;
}

/// By trying all.
double least(const std::vector<double>& costs, size_t from, int64_t stages) {
  double sum = 0;
  if (stages == 1) {
    for (auto i = from; i < costs.size(); ++i) {
      sum += costs[i];
    }
    return sum;
  }
  double best = INFINITY;
  for (auto end = from + 1; end + stages - 1 <= costs.size(); ++end) {
    sum += costs[end - 1];
    best = std::min(best, std::max(sum, least(costs, end, stages - 1)));
  }
  return best;
}
}  // namespace

TEST_CASE("Layers are balanced so that the costliest stage costs least", "[pipeline]") {
  CHECK(balanced({1, 1, 1, 1}, 2) == std::vector<int64_t>{2, 2});
  CHECK(balanced({5, 1, 1, 1, 1, 1}, 2) == std::vector<int64_t>{1, 5});
  CHECK(balanced({0, 0, 0}, 3) == std::vector<int64_t>{1, 1, 1});
  CHECK(balanced({9, 1, 1, 1}, 3) == std::vector<int64_t>{1, 1, 2});
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<double> costs(1 + random() % 9);
    for (auto& cost : costs) {
      cost = static_cast<double>(random() % 20);
    }
    for (int64_t stages = 1; stages <= std::ssize(costs); ++stages) {
      const auto counts = balanced(costs, stages);
      REQUIRE(std::ssize(counts) == stages);
      REQUIRE(*std::min_element(counts.begin(), counts.end()) >= 1);
      REQUIRE(costliest(costs, counts) == least(costs, 0, stages));
    }
  }
}

TEST_CASE("What cannot be balanced is named", "[pipeline]") {
  CHECK_THROWS_WITH(balanced({1, 2}, 3), Catch::Contains("stages: 3, layers: 2"));
  CHECK_THROWS_AS(balanced({1, 2}, 0), c10::ValueError);
  CHECK_THROWS_WITH(balanced({1, -2}, 1), Catch::Contains("layer: 1, cost: -2"));
  CHECK_THROWS_AS(balanced({NAN}, 1), c10::ValueError);
}

}  // namespace test_balance
