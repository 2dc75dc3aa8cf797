#include "sizer/compare.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

namespace brimful::detail {
namespace {
constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor as_double(const at::Tensor& tensor) {
  const auto real = tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
  return real.to(at::kDouble);
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_meta() &&
         !tensor.is_quantized();
}

double relative(double difference, double size) {
  return difference == 0 ? 0 : difference / std::max(size, std::numeric_limits<double>::min());
}

/// Where sizes differ between the whole and a piece: nothing if nowhere, -1 if in several dimensions.
std::optional<int64_t> dimension_of_rows(const at::Tensor& whole,
                                         const std::vector<at::Tensor>& pieces) {
  std::optional<int64_t> found;
  for (const auto& piece : pieces) {
    for (int64_t dim = 0; dim < whole.dim(); ++dim) {
      if (piece.size(dim) != whole.size(dim)) {
        found = !found || *found == dim ? dim : -1;
      }
    }
  }
  return found;
}

/// The pieces where `dim` holds a run of rows for each of several steps, all of which go on with the rows of a piece.
at::Tensor joined_by_steps(const std::vector<at::Tensor>& pieces, const std::vector<int64_t>& rows,
                           int64_t dim, int64_t steps) {
  std::vector<at::Tensor> unfolded;
  unfolded.reserve(pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    unfolded.push_back(pieces[i].unflatten(dim, {steps, rows[i]}));
  }
  return at::cat(unfolded, dim + 1).flatten(dim, dim + 1);
}

double difference_along(const at::Tensor& whole, const std::vector<at::Tensor>& pieces,
                        const std::vector<int64_t>& rows, int64_t dim) {
  const auto total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  const auto size =
      std::accumulate(pieces.begin(), pieces.end(), int64_t{0},
                      [&](int64_t sum, const at::Tensor& piece) { return sum + piece.size(dim); });
  if (size != whole.size(dim)) {
    return kInfinity;
  }
  auto difference = largest_difference(whole, at::cat(pieces, dim));
  const auto steps = size / total;
  bool in_steps = steps > 1 && size % total == 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    in_steps = in_steps && pieces[i].size(dim) == steps * rows[i];
  }
  if (difference > 0 && in_steps) {
    difference =
        std::min(difference, largest_difference(whole, joined_by_steps(pieces, rows, dim, steps)));
  }
  return relative(difference, largest_value(whole));
}

double difference_from_mean(const at::Tensor& whole, const std::vector<at::Tensor>& pieces,
                            const std::vector<int64_t>& rows) {
  const auto total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  double mean = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    mean += pieces[i].item<double>() * static_cast<double>(rows[i]) / static_cast<double>(total);
  }
  const auto value = whole.item<double>();
  return relative(std::abs(value - mean), std::abs(value));
}
}  // namespace

double largest_value(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return 0;
  }
  return as_double(tensor).abs().nan_to_num(0, 0, 0).max().item<double>();
}

double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0) {
    return 0;
  }
  const auto x = as_double(a);
  const auto y = as_double(b);
  const auto alike = x.eq(y).logical_or(x.isnan().logical_and(y.isnan()));
  const auto difference = (x - y).abs().masked_fill(alike, 0);
  return difference.nan_to_num(kInfinity, kInfinity).max().item<double>();
}

double difference_of_pieces(const at::Tensor& whole, const std::vector<at::Tensor>& pieces,
                            const std::vector<int64_t>& rows, bool may_be_mean) {
  for (const auto& piece : pieces) {
    if (!is_plain(whole) || !is_plain(piece)) {
      return 0;
    }
    if (piece.dim() != whole.dim() || piece.scalar_type() != whole.scalar_type()) {
      return kInfinity;
    }
  }
  const auto dim = dimension_of_rows(whole, pieces);
  if (dim) {
    return *dim < 0 ? kInfinity : difference_along(whole, pieces, rows, *dim);
  }
  double difference = 0;
  for (const auto& piece : pieces) {
    difference = std::max(difference, largest_difference(whole, piece));
  }
  difference = relative(difference, largest_value(whole));
  if (difference > 0 && may_be_mean && whole.numel() == 1 && !whole.is_complex()) {
    difference = std::min(difference, difference_from_mean(whole, pieces, rows));
  }
  return difference;
}

}  // namespace brimful::detail
