#include <brimful/step/pieces.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

namespace brimful {
namespace {
constexpr size_t kEqualSizes = 4;
constexpr int64_t kManyRetries = 8;
constexpr double kLargestStep =
    4;  // times as many pieces, in the last retries rather than in the first

}  // namespace

int64_t common_size(int64_t size) {
  int64_t power = 1;
  while (2 * power <= size) {
    power *= 2;
  }
  const auto between = power / 2 * 3;
  return between > power && between <= size ? between : power;
}

std::vector<int64_t> split_rows(int64_t rows, int64_t pieces) {
  TORCH_CHECK_VALUE(rows >= 0 && pieces >= 1, "cannot split a batch (rows: ", rows,
                    ", pieces: ", pieces, ")");
  std::vector<int64_t> split(pieces, rows / pieces);
  std::for_each(split.begin(), split.begin() + rows % pieces, [](int64_t& size) { ++size; });
  return split;
}

int64_t largest_piece(const std::vector<int64_t>& split) {
  return split.empty() ? 0 : *std::max_element(split.begin(), split.end());
}

int64_t pieces_for(int64_t rows, int64_t piece_rows) {
  return std::max<int64_t>(1, (rows + piece_rows - 1) / piece_rows);
}

int64_t equal_pieces(int64_t rows, int64_t pieces) {
  for (int64_t more = pieces; more <= pieces + pieces / 4; ++more) {
    if (rows % more == 0) {
      return more;
    }
  }
  return pieces;
}

std::vector<int64_t> split_into_few_sizes(int64_t rows, int64_t piece_rows,
                                          std::set<int64_t>& equal_sizes) {
  TORCH_CHECK_VALUE(rows >= 0 && piece_rows >= 1, "cannot split a batch (rows: ", rows,
                    ", rows of a piece: ", piece_rows, ")");
  const auto pieces = equal_pieces(rows, pieces_for(rows, piece_rows));
  if (pieces == 1) {
    return {rows};
  }
  if (rows % pieces == 0 && equal_sizes.size() < kEqualSizes) {
    equal_sizes.insert(rows / pieces);
  }
  if (rows % pieces == 0 && equal_sizes.count(rows / pieces) != 0) {
    return split_rows(rows, pieces);
  }
  std::vector<int64_t> split;
  for (auto size = common_size(piece_rows); rows > 0; size = common_size(std::min(size, rows))) {
    if (rows - size == 1 && size > 2) {
      size = common_size(size - 1);
    }
    split.push_back(size);
    rows -= size;
  }
  return split;
}

int64_t finer(int64_t rows, int64_t pieces) {
  return std::min(rows, 2 * pieces);
}

int64_t finer_within(int64_t rows, int64_t pieces, int64_t failures, int64_t max_retries) {
  const auto halved = finer(rows, pieces);
  const auto retries = max_retries - failures + 1;  // this one included
  const auto left = static_cast<double>(pieces_for(rows, pieces));
  const bool can_wait = left <= 2 * std::pow(kLargestStep, static_cast<double>(retries - 1));
  if (retries < 1 || max_retries < kManyRetries || can_wait) {
    return halved;
  }
  const auto factor = std::pow(left, 1 / static_cast<double>(retries));
  const auto wanted = std::ceil(static_cast<double>(pieces) * factor * (1 - 1e-12));
  return std::clamp(static_cast<int64_t>(wanted), halved, rows);
}

}  // namespace brimful
