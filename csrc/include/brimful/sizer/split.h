#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace brimful {

// rows_of(batch): rows along dimension 0, equal in all tensors of the batch.
// slice_rows(batch, begin, end): the same structure with views of those rows.
// For tensors, vectors, pairs, tuples, maps, and anything with `data` and `target` (torch::data::Example).

inline int64_t rows_of(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined() && tensor.dim() > 0,
                    "a tensor of the batch has no dimension to split");
  return tensor.size(0);
}

inline at::Tensor slice_rows(const at::Tensor& tensor, int64_t begin, int64_t end) {
  return tensor.narrow(0, begin, end - begin);
}

namespace detail {
inline int64_t same_rows(std::optional<int64_t> before, int64_t rows) {
  TORCH_CHECK_VALUE(!before || *before == rows,
                    "tensors of the batch disagree in size (rows: ", before.value_or(0), " and ",
                    rows, ")");
  return rows;
}
}  // namespace detail

template <typename Batch>
requires requires(const Batch& batch) {
  batch.data;
  batch.target;
}
int64_t rows_of(const Batch& batch) {
  return detail::same_rows(rows_of(batch.data), rows_of(batch.target));
}

template <typename Batch>
requires requires(const Batch& batch) {
  batch.data;
  batch.target;
}
Batch slice_rows(const Batch& batch, int64_t begin, int64_t end) {
  return Batch(slice_rows(batch.data, begin, end), slice_rows(batch.target, begin, end));
}

template <typename T>
int64_t rows_of(const std::vector<T>& batch) {
  std::optional<int64_t> rows;
  for (const auto& item : batch) {
    rows = detail::same_rows(rows, rows_of(item));
  }
  return rows.value_or(0);
}

template <typename T>
std::vector<T> slice_rows(const std::vector<T>& batch, int64_t begin, int64_t end) {
  std::vector<T> piece;
  for (const auto& item : batch) {
    piece.push_back(slice_rows(item, begin, end));
  }
  return piece;
}

template <typename K, typename T>
int64_t rows_of(const std::map<K, T>& batch) {
  std::optional<int64_t> rows;
  for (const auto& [key, item] : batch) {
    rows = detail::same_rows(rows, rows_of(item));
  }
  return rows.value_or(0);
}

template <typename K, typename T>
std::map<K, T> slice_rows(const std::map<K, T>& batch, int64_t begin, int64_t end) {
  std::map<K, T> piece;
  for (const auto& [key, item] : batch) {
    piece.emplace(key, slice_rows(item, begin, end));
  }
  return piece;
}

template <typename... T>
int64_t rows_of(const std::tuple<T...>& batch) {
  std::optional<int64_t> rows;
  std::apply([&](const auto&... item) { ((rows = detail::same_rows(rows, rows_of(item))), ...); },
             batch);
  return rows.value_or(0);
}

template <typename... T>
std::tuple<T...> slice_rows(const std::tuple<T...>& batch, int64_t begin, int64_t end) {
  return std::apply(
      [&](const auto&... item) { return std::tuple<T...>(slice_rows(item, begin, end)...); },
      batch);
}

template <typename A, typename B>
int64_t rows_of(const std::pair<A, B>& batch) {
  return detail::same_rows(rows_of(batch.first), rows_of(batch.second));
}

template <typename A, typename B>
std::pair<A, B> slice_rows(const std::pair<A, B>& batch, int64_t begin, int64_t end) {
  return {slice_rows(batch.first, begin, end), slice_rows(batch.second, begin, end)};
}

}  // namespace brimful
