#pragma once
// How each kind of a batch's parts is split; included by split.h.
#include <ATen/core/Tensor.h>
#include <brimful/export.h>
#include <brimful/sizer/row_evidence.h>
#include <brimful/sizer/row_kind.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <variant>

namespace c10 {
struct IValue;
}

namespace brimful::detail {

struct Range {
  int64_t rows = 0;  ///< of the whole batch
  int64_t begin = 0;
  int64_t end = 0;
};

/// Nothing for a tensor without dimensions or values.
/// @throws c10::ValueError if it has others, but not `dim`
BRIMFUL_API Rows tensor_rows(const at::Tensor& tensor, int64_t dim);
/// A view of a dense tensor's rows, a copy of a sparse one's. Rows of a CSR tensor wait for its device.
/// @throws c10::TypeError for sparse layouts that have no rows of their own
BRIMFUL_API at::Tensor slice_tensor(const at::Tensor& tensor, int64_t dim, const Range& range);

inline void add_rows(RowEvidence& found, Rows more) {
  TORCH_CHECK_VALUE(!found.rows || !more || *found.rows == *more,
                    "tensors of the batch disagree in size (rows: ", found.rows.value_or(0),
                    " and ", more.value_or(0), "); give all the same number");
  found.rows = found.rows ? found.rows : more;
}

/// Tensors that are alike may be columns or rows: the whole batch shows it.
BRIMFUL_API void add_list(RowEvidence& found, at::TensorList tensors);
/// In a batch of so many rows.
BRIMFUL_API bool are_rows(at::TensorList tensors, int64_t rows);

struct BuiltIn {};

/// Called with each tensor of a batch.
using Visit = std::function<void(const at::Tensor&)>;

template <typename T>
struct SharedPart : BuiltIn {
  static void count(const T& /*part*/, RowEvidence& /*found*/) {}
  static T slice(const T& part, const Range& /*range*/) { return part; }
  static void describe(const T& /*part*/, RowKind& /*kind*/) {}
  static void visit(const T& /*part*/, const Visit& /*visit*/) {}
};

/// A type of the user's, with functions beside it.
template <typename T>
struct Part {
  static void count(const T& part, RowEvidence& found) { add_rows(found, rows_of(part)); }
  static T slice(const T& part, const Range& range) {
    return slice_rows(part, range.begin, range.end);
  }
  static void describe(const T& part, RowKind& kind) {
    if constexpr (requires { add_kind(part, kind); }) {
      add_kind(part, kind);
    }
  }
  static void visit(const T& part, const Visit& visit) {
    if constexpr (requires { for_each_tensor(part, visit); }) {
      for_each_tensor(part, visit);
    }
  }
};

template <typename T>
concept Structure = std::derived_from<Part<T>, BuiltIn>;

template <typename T>
concept Scalar = std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_same_v<T, std::string> ||
    std::is_same_v<T, std::monostate> || std::is_same_v<T, std::nullopt_t>;
template <Scalar T>
struct Part<T> : SharedPart<T> {};

template <>
struct Part<at::Tensor> : BuiltIn {
  static void count(const at::Tensor& part, RowEvidence& found) {
    add_rows(found, tensor_rows(part, 0));
  }
  static at::Tensor slice(const at::Tensor& part, const Range& range) {
    return slice_tensor(part, 0, range);
  }
  static void describe(const at::Tensor& part, RowKind& kind) { kind.add(part, 0); }
  static void visit(const at::Tensor& part, const Visit& visit) { visit(part); }
};

/// Tensors, lists, tuples and dicts in it are walked; its strings, numbers and None are shared.
template <>
struct BRIMFUL_API Part<c10::IValue> : BuiltIn {
  static void count(const c10::IValue& part, RowEvidence& found);
  static c10::IValue slice(const c10::IValue& part, const Range& range);
  static void describe(const c10::IValue& part, RowKind& kind);
  static void visit(const c10::IValue& part, const Visit& visit);
};

template <typename T>
auto slice_part(const T& part, const Range& range) {
  return Part<T>::slice(part, range);
}
template <typename T>
void count_part(const T& part, RowEvidence& found) {
  Part<T>::count(part, found);
}
template <typename T>
void describe_part(const T& part, RowKind& kind) {
  Part<T>::describe(part, kind);
}
template <typename T>
void visit_part(const T& part, const Visit& visit) {
  Part<T>::visit(part, visit);
}

}  // namespace brimful::detail
