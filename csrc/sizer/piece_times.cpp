#include "sizer/piece_times.h"

#include <cmath>
#include <optional>

namespace brimful {
namespace {
constexpr double kKeptOfTimes = 0.99;   // of what was seen, when more is
constexpr double kGuessedTokens = 64;   // that cost what a piece costs for itself
constexpr double kGuessWeight = 1e-3;   // beside one equation
constexpr double kTokensOfPiece = 256;  // units in which the three sizes are alike
constexpr double kTypicalLength = 256;
constexpr double kLeastPivot = 1e-12;

using Three = std::array<double, 3>;
using Matrix = std::array<Three, 3>;

/// The least squares with those of the three that `mask` names; nothing where one of them is negative.
std::optional<Three> solve(Matrix matrix, Three values, unsigned mask) {
  for (size_t i = 0; i < 3; ++i) {
    if ((mask >> i & 1U) == 0) {
      for (size_t j = 0; j < 3; ++j) {
        matrix[i][j] = matrix[j][i] = 0;
      }
      matrix[i][i] = 1;
      values[i] = 0;
    }
  }
  for (size_t i = 0; i < 3; ++i) {  // symmetric and positive: no pivots are needed
    if (matrix[i][i] < kLeastPivot) {
      return std::nullopt;
    }
    for (size_t row = 0; row < 3; ++row) {
      const double factor = row == i ? 0 : matrix[row][i] / matrix[i][i];
      for (size_t j = 0; j < 3; ++j) {
        matrix[row][j] -= factor * matrix[i][j];
      }
      values[row] -= factor * values[i];
    }
  }
  for (size_t i = 0; i < 3; ++i) {
    values[i] /= matrix[i][i];
    if (values[i] < 0) {
      return std::nullopt;
    }
  }
  return values;
}

/// Of the squares, without the part that is the same for all.
double error_of(const Matrix& matrix, const Three& values, const Three& solution) {
  double sum = 0;
  for (size_t i = 0; i < 3; ++i) {
    for (size_t j = 0; j < 3; ++j) {
      sum += solution[i] * matrix[i][j] * solution[j];
    }
    sum -= 2 * solution[i] * values[i];
  }
  return sum;
}
}  // namespace

void PieceTimes::note(const Lengths& lengths, int64_t place, const std::vector<int64_t>& split,
                      double ms) {
  double tokens = 0;
  double squares = 0;
  for (const auto rows : split) {
    const auto length = static_cast<double>(lengths.at(place));
    tokens += static_cast<double>(rows) * length;
    squares += static_cast<double>(rows) * length * length;
    place += rows;
  }
  if (tokens <= 0 || !std::isfinite(ms) || ms <= 0) {
    return;
  }
  // By tokens: a short piece that is a tenth off counts as much as a long one.
  const Three has = {static_cast<double>(split.size()) * kTokensOfPiece / tokens, 1,
                     squares / tokens / kTypicalLength};
  for (size_t i = 0; i < 3; ++i) {
    for (size_t j = 0; j < 3; ++j) {
      products_[i][j] = kKeptOfTimes * products_[i][j] + has[i] * has[j];
    }
    times_[i] = kKeptOfTimes * times_[i] + has[i] * ms / tokens;
  }
  seen_ = kKeptOfTimes * seen_ + 1;
}

PieceCost PieceTimes::cost() const {
  if (seen_ == 0) {
    return {kGuessedTokens, 1, 0};
  }
  auto matrix = products_;
  auto values = times_;
  const Three guess = {times_[1] / seen_ * kGuessedTokens / kTokensOfPiece, times_[1] / seen_, 0};
  for (size_t i = 0; i < 3; ++i) {
    matrix[i][i] += kGuessWeight;
    values[i] += kGuessWeight * guess[i];
  }
  Three best = guess;
  double least = error_of(matrix, values, guess);
  for (unsigned mask = 1; mask < 8; ++mask) {
    const auto found = solve(matrix, values, mask);
    if (const double error = found ? error_of(matrix, values, *found) : least; error < least) {
      least = error;
      best = *found;
    }
  }
  return {best[0] * kTokensOfPiece, best[1], best[2] / kTypicalLength};
}

}  // namespace brimful
