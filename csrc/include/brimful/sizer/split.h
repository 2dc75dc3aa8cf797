#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/sizer/split_containers.h>
#include <brimful/sizer/split_part.h>
#include <brimful/step/kept_batch.h>

#include <string>
#include <vector>

namespace brimful {

// What can be split: tensors, vectors, pairs, tuples, maps, optionals, variants, torch::data::Example and its like (`data`, and
// `target` where there is one), c10::IValue, and any nesting of them. Strings, numbers, and tensors that are 0-dim or
// undefined go to all pieces. A type of your own takes part when functions `int64_t rows_of(const T&)` and
// `T slice_rows(const T&, int64_t begin, int64_t end)` stand in its namespace; with a function
// `void for_each_tensor(const T&, const std::function<void(const at::Tensor&)>&)` there, tensors of it that a loss function
// changes in place are as before when rows are run again.

/// A tensor whose rows lie along `dim`; negative ones count from the end.
struct Along {
  at::Tensor tensor;
  int64_t dim = 0;
};

/// A part of a batch that every piece gets whole.
template <typename T>
struct Shared {
  T value;
};
template <typename T>
Shared(T) -> Shared<T>;

/// Rows of a batch, equal in all its tensors. A vector of Examples, as a loader without Stack gives, has a row in each
/// entry. So has a vector of alike tensors if the rest of the batch has as many rows as it has entries, and its tensors
/// have not; else they are columns. Columns in a tuple, pair or array are never taken for rows.
/// @throws c10::ValueError if tensors disagree (the sizes are named), if there is none, or if a vector could be both
template <detail::Structure Batch>
int64_t rows_of(const Batch& batch) {
  detail::RowEvidence found;
  detail::Part<Batch>::count(batch, found);
  const auto rows = detail::decide_rows(found);
  TORCH_CHECK_VALUE(rows,
                    "the batch holds no tensor that has a dimension to split; pass one, or a "
                    "structure of them");
  return *rows;
}

/// The same structure with rows [begin, end): views where tensors are dense, copies where they are sparse. A vector of
/// strings or numbers with as many entries as there are rows is cut too.
template <detail::Structure Batch>
Batch slice_rows(const Batch& batch, int64_t begin, int64_t end) {
  return detail::Part<Batch>::slice(batch, {rows_of(batch), begin, end});
}

/// What forecasts of memory go by. A type of your own that has a size which varies, such as a sequence's length, has a
/// function `void add_kind(const T&, RowKind&)` in its namespace too.
template <typename Batch>
RowKind kind_of(const Batch& batch) {
  RowKind kind;
  detail::Part<Batch>::describe(batch, kind);
  return kind;
}

/// Calls `visit` with each tensor of a batch.
template <detail::Structure Batch>
void for_each_tensor(const Batch& batch, const std::function<void(const at::Tensor&)>& visit) {
  detail::Part<Batch>::visit(batch, visit);
}

namespace detail {
template <typename Batch>
std::vector<NamedTensor> tensors_of(const Batch& batch) {
  std::vector<NamedTensor> tensors;
  const Visit add = [&](const at::Tensor& tensor) {
    tensors.emplace_back("number " + std::to_string(tensors.size()), tensor);
  };
  visit_part(batch, add);
  return tensors;
}

/// Of rows [begin, end): the whole batch as it is, whose pieces share the versions of its tensors.
template <typename Batch>
std::vector<NamedTensor> tensors_of(const Batch& batch, int64_t begin, int64_t end) {
  return begin == 0 && end == rows_of(batch) ? tensors_of(batch)
                                             : tensors_of(slice_rows(batch, begin, end));
}

template <>
struct Part<Along> : BuiltIn {
  static void count(const Along& part, RowEvidence& found) {
    add_rows(found, tensor_rows(part.tensor, part.dim));
  }
  static Along slice(const Along& part, const Range& range) {
    return {slice_tensor(part.tensor, part.dim, range), part.dim};
  }
  static void describe(const Along& part, RowKind& kind) { kind.add(part.tensor, part.dim); }
  static void visit(const Along& part, const Visit& visit) { visit(part.tensor); }
};

template <typename T>
struct Part<Shared<T>> : SharedPart<Shared<T>> {
  static void describe(const Shared<T>& part, RowKind& kind) {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      kind.add(part.value, std::nullopt);
    }
  }
  static void visit(const Shared<T>& part, const Visit& visit) {
    if constexpr (Structure<T>) {
      visit_part(part.value, visit);
    }
  }
};
}  // namespace detail

}  // namespace brimful
