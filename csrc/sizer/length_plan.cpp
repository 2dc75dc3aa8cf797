#include "sizer/length_plan.h"

#include <brimful/step/pieces.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace brimful {
namespace {
constexpr int64_t kSteps = 16;  // of lengths from one power of two to the next

void require_falling(const Lengths& lengths) {
  for (size_t i = 0; i < lengths.size(); ++i) {
    TORCH_CHECK_VALUE(lengths[i] > 0 && (i == 0 || lengths[i] <= lengths[i - 1]),
                      "lengths of rows must be positive, and none longer than the one before "
                      "(place: ",
                      i, ", length: ", lengths[i], "); sort the rows by length, the longest first");
  }
}

int64_t rows_at(const MostRows& most_rows, int64_t place, int64_t count) {
  return std::clamp<int64_t>(most_rows(place), 1, count - place);
}
}  // namespace

MostRows within_tokens(const Lengths& lengths, int64_t tokens) {
  return [&lengths, tokens](int64_t place) { return tokens / lengths[place]; };
}

std::vector<int64_t> fastest_split(const Lengths& lengths, const MostRows& most_rows,
                                   const PieceCost& cost) {
  require_falling(lengths);
  const auto count = std::ssize(lengths);
  std::vector<double> least(count + 1, 0);  // of the rows from a place on
  std::vector<int64_t> rows(count, 1);
  for (int64_t place = count - 1; place >= 0; --place) {
    least[place] = std::numeric_limits<double>::infinity();
    for (auto size = rows_at(most_rows, place, count); size >= 1; --size) {
      const auto all = cost.of(size, lengths[place]) + least[place + size];
      if (all < least[place]) {
        least[place] = all;
        rows[place] = size;
      }
    }
  }
  std::vector<int64_t> split;
  for (int64_t place = 0; place < count; place += split.back()) {
    split.push_back(rows[place]);
  }
  return split;
}

std::vector<int64_t> split_of_few_shapes(const Lengths& lengths, const MostRows& most_rows,
                                         const PieceCost& cost) {
  const auto tokens = largest_tokens(lengths, fastest_split(lengths, most_rows, cost));
  const auto count = std::ssize(lengths);
  std::vector<int64_t> split;
  for (int64_t place = 0; place < count;) {
    const auto most = std::min(most_rows(place), tokens / lengths[place]);
    const auto size = common_size(std::max<int64_t>(most, 1));
    split.push_back(size <= count - place ? size : common_size(count - place));
    place += split.back();
  }
  return split;
}

int64_t largest_tokens(const Lengths& lengths, const std::vector<int64_t>& split) {
  int64_t place = 0;
  int64_t most = 0;
  for (const auto rows : split) {
    most = std::max(most, rows * lengths.at(place));
    place += rows;
  }
  return most;
}

MostRows within_packed_tokens(const Lengths& lengths, int64_t tokens) {
  std::vector<int64_t> ends(lengths.size());
  std::partial_sum(lengths.begin(), lengths.end(), ends.begin());
  return [ends = std::move(ends), tokens](int64_t place) {
    const auto before = place == 0 ? 0 : ends[place - 1];
    return std::upper_bound(ends.begin() + place, ends.end(), before + tokens) -
           (ends.begin() + place);
  };
}

std::vector<int64_t> largest_pieces(const Lengths& lengths, const MostRows& most_rows) {
  require_falling(lengths);
  const auto count = std::ssize(lengths);
  std::vector<int64_t> split;
  for (int64_t place = 0; place < count; place += split.back()) {
    split.push_back(rows_at(most_rows, place, count));
  }
  return split;
}

int64_t largest_packed_tokens(const Lengths& lengths, const std::vector<int64_t>& split) {
  auto row = lengths.begin();
  int64_t most = 0;
  for (const auto rows : split) {
    most = std::max(most, std::accumulate(row, row + rows, int64_t{0}));
    row += rows;
  }
  return most;
}

int64_t rounded_length(int64_t length) {
  int64_t step = 1;
  while (step * 2 * kSteps <= length) {
    step *= 2;
  }
  return (length + step - 1) / step * step;
}

}  // namespace brimful
