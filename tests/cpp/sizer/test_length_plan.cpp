#include <c10/util/Exception.h>
#include "sizer/length_plan.h"
#include "sizer/piece_times.h"
#include "support/catch.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace test_length_plan {

using brimful::fastest_split;
using brimful::largest_packed_tokens;
using brimful::largest_pieces;
using brimful::largest_tokens;
using brimful::Lengths;
using brimful::PieceCost;
using brimful::PieceTimes;
using brimful::rounded_length;
using brimful::split_of_few_shapes;
using brimful::within_packed_tokens;
using brimful::within_tokens;

namespace {
using Split = std::vector<int64_t>;

double cost_of(const Lengths& lengths, const Split& split, const PieceCost& cost) {
  double sum = 0;
  int64_t place = 0;
  for (const auto rows : split) {
    sum += cost.of(rows, lengths[place]);
    place += rows;
  }
  return sum;
}

/// Of all splits whose pieces have so many tokens at most, or one row.
double least_cost(const Lengths& lengths, int64_t tokens, const PieceCost& cost) {
  const auto cuts = lengths.size() - 1;
  double least = std::numeric_limits<double>::infinity();
  for (uint64_t mask = 0; mask < uint64_t{1} << cuts; ++mask) {
    Split split = {1};
    for (size_t i = 0; i < cuts; ++i) {
      if ((mask >> i & 1U) != 0) {
        split.push_back(1);
      } else {
        ++split.back();
      }
    }
    int64_t place = 0;
    bool fits = true;
    for (const auto rows : split) {
      fits = fits && (rows == 1 || rows * lengths[place] <= tokens);
      place += rows;
    }
    least = fits ? std::min(least, cost_of(lengths, split, cost)) : least;
  }
  return least;
}

Lengths falling(std::mt19937& random, size_t count, int64_t longest) {
  Lengths lengths(count);
  for (auto& length : lengths) {
    length = 1 + static_cast<int64_t>(random() % longest);
  }
  std::sort(lengths.rbegin(), lengths.rend());
  return lengths;
}
}  // namespace

TEST_CASE("the split of rows by length is the cheapest there is", "[length_plan]") {
  std::mt19937 random(1);
  for (int i = 0; i < 60; ++i) {
    const auto lengths = falling(random, 1 + random() % 10, 100);
    const int64_t tokens = 1 + static_cast<int64_t>(random() % 400);
    const PieceCost cost{static_cast<double>(random() % 100), 1,
                         static_cast<double>(random() % 3) / 100};
    const auto split = fastest_split(lengths, within_tokens(lengths, tokens), cost);
    CHECK(std::accumulate(split.begin(), split.end(), int64_t{0}) == std::ssize(lengths));
    CHECK(cost_of(lengths, split, cost) == Approx(least_cost(lengths, tokens, cost)));
  }
}

TEST_CASE("a piece that costs nothing holds rows of one length", "[length_plan]") {
  const Lengths lengths = {9, 9, 9, 4, 4, 1};
  CHECK(fastest_split(lengths, within_tokens(lengths, 1000), {0, 1, 0}) == Split{3, 2, 1});
  CHECK(fastest_split(lengths, within_tokens(lengths, 1000), {1000, 1, 0}) == Split{6});
  CHECK(fastest_split(lengths, within_tokens(lengths, 8), {1000, 1, 0}) == Split{1, 1, 1, 2, 1});
  CHECK(largest_tokens(lengths, {3, 2, 1}) == 27);
}

TEST_CASE("lengths that rise or are nothing are refused", "[length_plan]") {
  const Lengths rising = {3, 4};
  const Lengths none = {3, 0};
  CHECK_THROWS_AS(fastest_split(rising, within_tokens(rising, 9), {}), c10::ValueError);
  CHECK_THROWS_AS(fastest_split(none, within_tokens(rising, 9), {}), c10::ValueError);
}

TEST_CASE("a compiled model meets few shapes", "[length_plan]") {
  std::mt19937 random(2);
  const Lengths buckets = {64, 96, 128, 192, 256, 384, 512, 768};
  std::set<std::pair<int64_t, int64_t>> shapes;
  Lengths lengths;
  for (int i = 0; i < 200; ++i) {
    lengths.push_back(buckets[random() % buckets.size()]);
  }
  std::sort(lengths.rbegin(), lengths.rend());
  int64_t place = 0;
  int64_t rest = 0;
  for (const auto rows : split_of_few_shapes(lengths, within_tokens(lengths, 4096), {64, 1, 0})) {
    shapes.insert({rows, lengths[place]});
    place += rows;
    rest = rows;
  }
  CHECK(place == 200);
  CHECK(rest > 0);
  CHECK(shapes.size() <= buckets.size() + 4);
}

TEST_CASE("rounded lengths are few and hardly longer", "[length_plan]") {
  std::set<int64_t> rounded;
  for (int64_t length = 1; length <= 4096; ++length) {
    const auto more = rounded_length(length);
    rounded.insert(more);
    CHECK(more >= length);
    CHECK(more <= length + length / 16);
    CHECK(rounded_length(more) == more);
  }
  CHECK(rounded.size() <= 16 * 10);
}

TEST_CASE("what pieces take follows from those that were seen", "[length_plan]") {
  std::mt19937 random(3);
  const PieceCost real{3, 0.02, 0.00001};
  PieceTimes times;
  for (int i = 0; i < 100; ++i) {
    const Lengths lengths(1 + random() % 16, 16 + static_cast<int64_t>(random() % 500));
    const auto rows = std::ssize(lengths);
    const double noise = 1 + (static_cast<double>(random() % 100) - 50) / 1000;
    times.note(lengths, 0, {rows}, noise * real.of(rows, lengths.front()));
  }
  const auto cost = times.cost();
  for (const int64_t length : {32, 128, 500}) {
    CHECK(cost.of(8, length) == Approx(real.of(8, length)).epsilon(0.05));
  }
}

TEST_CASE("no part of a piece's cost is negative", "[length_plan]") {
  PieceTimes times;
  CHECK(times.cost().piece > 0);
  for (const int64_t length : {10, 20, 40, 80, 160}) {
    times.note({length}, 0, {1}, static_cast<double>(length * 1000) / (100.0 + length));
  }
  const auto cost = times.cost();
  CHECK(cost.piece >= 0);
  CHECK(cost.token >= 0);
  CHECK(cost.square >= 0);
}

TEST_CASE("rows without padding fill pieces by what they have together", "[length_plan]") {
  const Lengths lengths = {9, 5, 4, 4, 2, 1};
  CHECK(largest_pieces(lengths, within_packed_tokens(lengths, 25)) == Split{6});
  CHECK(largest_pieces(lengths, within_packed_tokens(lengths, 24)) == Split{5, 1});
  CHECK(largest_pieces(lengths, within_packed_tokens(lengths, 14)) == Split{2, 4});
  CHECK(largest_pieces(lengths, within_packed_tokens(lengths, 9)) == Split{1, 2, 3});
  CHECK(largest_pieces(lengths, within_packed_tokens(lengths, 1)) == Split{1, 1, 1, 1, 1, 1});
  CHECK(largest_packed_tokens(lengths, {1, 2, 3}) == 9);
  CHECK(largest_packed_tokens(lengths, {2, 4}) == 14);
  const Lengths rising = {1, 2};
  CHECK_THROWS_AS(largest_pieces(rising, within_packed_tokens(rising, 9)), c10::ValueError);
}

}  // namespace test_length_plan
