#include "support/catch.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "launch/share_rule.h"

namespace test_share_rule {

using brimful::launch::allot;
using brimful::launch::note_step;
using brimful::launch::ShareBounds;
using brimful::launch::ShareHistory;
using Rows = std::vector<int64_t>;
using Times = std::vector<double>;

namespace {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

int64_t sum(const Rows& rows) {
  return std::accumulate(rows.begin(), rows.end(), int64_t{0});
}

ShareBounds bounds(size_t ranks, int64_t least, int64_t most) {
  return {Rows(ranks, least), Rows(ranks, most)};
}

/// Ranks whose time follows from their rows.
struct Fleet {
  std::function<double(size_t rank, int64_t rows, int64_t step)> ms;
  int64_t lag = 2;
  ShareBounds limits;
  ShareHistory history;
  std::deque<Rows> upcoming;
  std::vector<Rows> taken;  ///< by step

  Fleet(Rows even, int64_t lag, std::function<double(size_t, int64_t, int64_t)> ms)
      : ms(std::move(ms)), lag(lag), limits(bounds(even.size(), 1, sum(even))) {
    history.shares = even;
    upcoming.assign(lag, even);
  }

  void run(int64_t steps) {
    for (int64_t i = 0; i < steps; ++i) {
      Times times;
      for (size_t rank = 0; rank < history.shares.size(); ++rank) {
        times.push_back(ms(rank, upcoming.front()[rank], std::ssize(taken)));
      }
      taken.push_back(upcoming.front());
      note_step(history, taken.back(), times, lag, limits);
      upcoming.pop_front();
      upcoming.push_back(history.shares);
    }
  }

  double slowest_ms(int64_t step) const {
    double slowest = 0;
    for (size_t rank = 0; rank < taken[step].size(); ++rank) {
      slowest = std::max(slowest, ms(rank, taken[step][rank], step));
    }
    return slowest;
  }
};

/// Rows in proportion, rounded down, and the rest one by one where it costs least now.
Rows allotted_one_by_one(const Times& weights, int64_t rows, const ShareBounds& limits) {
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  Rows shares;
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto quota = static_cast<int64_t>(static_cast<double>(rows) * weights[i] / total);
    shares.push_back(std::clamp(quota, limits.least[i], limits.most[i]));
  }
  while (sum(shares) != rows) {
    const bool more = sum(shares) < rows;
    size_t best = weights.size();
    double best_cost = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      const double cost = more ? static_cast<double>(shares[i] + 1) / weights[i]
                               : -(static_cast<double>(shares[i]) / weights[i]);
      const bool may = more ? shares[i] < limits.most[i] : shares[i] > limits.least[i];
      if (may && (best == weights.size() || cost < best_cost)) {
        best = i;
        best_cost = cost;
      }
    }
    shares[best] += more ? 1 : -1;
  }
  return shares;
}

}  // namespace

TEST_CASE("rows are dealt out in proportion, to the last one and within bounds", "[launch]") {
  CHECK(allot({1, 1}, 7, bounds(2, 1, 7)) == Rows{4, 3});
  CHECK(allot({2, 1}, 96, bounds(2, 1, 96)) == Rows{64, 32});
  CHECK(allot({1000, 1}, 10, bounds(2, 2, 10)) == Rows{8, 2});
  CHECK(allot({1, 1, 1}, 90, {{1, 1, 1}, {10, 90, 90}}) == Rows{10, 40, 40});
  std::mt19937 random(7);
  for (int i = 0; i < 2000; ++i) {
    const size_t ranks = 1 + random() % 9;
    const auto least = static_cast<int64_t>(random() % 3);
    const int64_t rows = static_cast<int64_t>(ranks) * (least + 1) + random() % 500;
    Times weights;
    ShareBounds limits = bounds(ranks, least, rows);
    for (size_t rank = 0; rank < ranks; ++rank) {
      weights.push_back(0.01 + static_cast<double>(random() % 1000));
      if (rank > 0) {
        limits.most[rank] = least + static_cast<int64_t>(random() % rows);
      }
    }
    const auto shares = allot(weights, rows, limits);
    CHECK(sum(shares) == rows);
    for (size_t rank = 0; rank < ranks; ++rank) {
      CHECK(shares[rank] >= limits.least[rank]);
      CHECK(shares[rank] <= limits.most[rank]);
    }
    CHECK(shares == allot(weights, rows, limits));
  }
}

TEST_CASE("the rest goes where it costs least, one by one, to the lowest of ranks that are alike",
          "[launch]") {
  std::mt19937 random(11);
  for (int i = 0; i < 500; ++i) {
    const size_t ranks = 2 + random() % 30;
    const auto least = static_cast<int64_t>(random() % 4);
    const int64_t rows = static_cast<int64_t>(ranks) * (least + 2) + random() % 300;
    Times weights;
    ShareBounds limits = bounds(ranks, least, rows);
    for (size_t rank = 0; rank < ranks; ++rank) {
      weights.push_back(static_cast<double>(1 + random() % 3));  // many are alike
      if (rank > 0 && random() % 3 == 0) {
        limits.most[rank] = least + static_cast<int64_t>(random() % 8);
      }
    }
    CHECK(allot(weights, rows, limits) == allotted_one_by_one(weights, rows, limits));
  }
}

TEST_CASE("sixty thousand ranks have their shares within a second", "[launch]") {
  constexpr size_t kRanks = 60'000;
  std::mt19937 random(2);
  Times weights;
  for (size_t rank = 0; rank < kRanks; ++rank) {
    weights.push_back(1000.0 + random() % 200);
  }
  const auto limits = bounds(kRanks, 1, 64 * kRanks);
  const auto begin = std::chrono::steady_clock::now();
  const auto shares = allot(weights, 64 * kRanks, limits);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(1));
  CHECK(sum(shares) == 64 * kRanks);
}

TEST_CASE("no other whole shares are faster", "[launch]") {
  std::mt19937 random(3);
  for (int i = 0; i < 200; ++i) {
    const Times speeds{1.0 + random() % 20, 1.0 + random() % 20, 1.0 + random() % 20};
    const int64_t rows = 3 + random() % 30;
    const auto ms = [&](const Rows& shares) {
      return std::max({shares[0] / speeds[0], shares[1] / speeds[1], shares[2] / speeds[2]});
    };
    double best = std::numeric_limits<double>::infinity();
    for (int64_t a = 1; a < rows - 1; ++a) {
      for (int64_t b = 1; a + b < rows; ++b) {
        best = std::min(best, ms({a, b, rows - a - b}));
      }
    }
    CHECK(ms(allot(speeds, rows, bounds(3, 1, rows))) == best);
  }
}

TEST_CASE("a slow rank's share settles as soon as three steps were seen", "[launch]") {
  const int64_t lag = GENERATE(1, 2, 6, 18);
  Fleet fleet({64, 64, 64, 64}, lag, [](size_t rank, int64_t rows, int64_t step) {
    return 1.0 + static_cast<double>(rows) * (rank == 2 && step >= 40 ? 0.5 : 0.25);
  });
  fleet.run(100);
  for (int64_t step = 0; step < 40 + lag + 2; ++step) {
    CHECK(fleet.taken[step] == Rows{64, 64, 64, 64});
  }
  for (int64_t step = 40 + lag + 3; step < 100; ++step) {
    CHECK(fleet.slowest_ms(step) < 1.05 * (1 + 256 * 0.25 / 3.5));
    CHECK(sum(fleet.taken[step]) == 256);
  }
}

TEST_CASE("a speed that changes again before its new share is seen is followed at once",
          "[launch]") {
  const int64_t lag = 8;
  Fleet fleet({64, 64, 64, 64}, lag, [](size_t rank, int64_t rows, int64_t step) {
    return static_cast<double>(rows) * (rank == 2 && step >= 40 && step < 45 ? 0.5 : 0.25);
  });
  fleet.run(80);
  CHECK(fleet.taken[40 + lag + 3] == Rows{74, 73, 36, 73});
  for (int64_t step = 45 + lag + 3; step < 80; ++step) {
    CHECK(fleet.slowest_ms(step) < 1.05 * 64 * 0.25);
  }
}

TEST_CASE("shares do not follow what gains less than five percent, nor single slow steps",
          "[launch]") {
  Fleet near({100, 100}, 2, [](size_t rank, int64_t rows, int64_t /*step*/) {
    return static_cast<double>(rows) * (rank == 0 ? 1.09 : 1.0);
  });
  near.run(50);
  CHECK(near.taken.back() == Rows{100, 100});
  Fleet hiccups({100, 100}, 2, [](size_t rank, int64_t rows, int64_t step) {
    return static_cast<double>(rows) + (rank == 0 && step % 3 == 0 ? 5000.0 : 0.0);
  });
  hiccups.run(50);
  CHECK(hiccups.taken.back() == Rows{100, 100});
  Fleet far({100, 100}, 2, [](size_t rank, int64_t rows, int64_t /*step*/) {
    return static_cast<double>(rows) * (rank == 0 ? 1.2 : 1.0);
  });
  far.run(50);
  CHECK(far.taken.back() == Rows{91, 109});
}

TEST_CASE("ranks whose time is not known keep their share", "[launch]") {
  Fleet fleet({30, 30, 30}, 2, [](size_t rank, int64_t rows, int64_t /*step*/) {
    return rank == 1 ? kUnknown : static_cast<double>(rows) * (rank == 0 ? 2.0 : 1.0);
  });
  fleet.run(20);
  CHECK(fleet.taken.back() == Rows{20, 30, 40});
  Fleet one_known({30, 30}, 2, [](size_t rank, int64_t rows, int64_t /*step*/) {
    return rank == 1 ? 0.0 : static_cast<double>(rows);
  });
  one_known.run(20);
  CHECK(one_known.taken.back() == Rows{30, 30});
}

TEST_CASE("shares do not swing where time is not in proportion to rows", "[launch]") {
  const int64_t lag = GENERATE(1, 4, 10);
  Fleet steep({64, 64}, lag, [](size_t rank, int64_t rows, int64_t /*step*/) {
    return std::pow(static_cast<double>(rows), 2) * (rank == 0 ? 1 : 4);
  });
  steep.run(400);
  for (int64_t step = 200; step < 400; ++step) {
    CHECK(steep.slowest_ms(step) < 1.25 * steep.slowest_ms(399));
    CHECK(steep.slowest_ms(step) < 0.6 * steep.slowest_ms(0));
  }
  Fleet constant({64, 64}, lag, [](size_t rank, int64_t rows, int64_t /*step*/) {
    return (rank == 0 ? 20.0 : 40.0) + static_cast<double>(rows) * 0.1;
  });
  constant.run(400);
  for (int64_t step = 200; step < 400; ++step) {
    CHECK(constant.slowest_ms(step) <= constant.slowest_ms(0));
  }
}

}  // namespace test_share_rule
