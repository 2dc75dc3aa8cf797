#pragma once
// How torch::data's Examples are split, and vectors, which may hold a row in each entry; included by split.h.
#include <brimful/sizer/split_part.h>

#include <concepts>
#include <type_traits>
#include <vector>

namespace brimful::detail {

struct Anything {
  template <typename T>
  operator T() const;
};

/// Has `data` and `target`, and no member beside them that would be lost.
template <typename T>
concept Example = requires(const T& part) {
  part.data;
  T{part.data, part.target};
}
&&!(std::is_aggregate_v<T> && requires { T{Anything{}, Anything{}, Anything{}}; });
/// Has `data` alone.
template <typename T>
concept TensorExample = requires(const T& part) {
  part.data;
  T{part.data};
}
&&!requires(const T& part) {
  part.target;
}
&&!(std::is_aggregate_v<T> && requires { T{Anything{}, Anything{}}; });

template <Example T>
struct Part<T> : BuiltIn {
  static void count(const T& part, RowEvidence& found) {
    count_part(part.data, found);
    count_part(part.target, found);
  }
  static T slice(const T& part, const Range& range) {
    return T{slice_part(part.data, range), slice_part(part.target, range)};
  }
  static void describe(const T& part, RowKind& kind) {
    describe_part(part.data, kind);
    describe_part(part.target, kind);
  }
  static void visit(const T& part, const Visit& visit) {
    visit_part(part.data, visit);
    visit_part(part.target, visit);
  }
};

template <TensorExample T>
struct Part<T> : BuiltIn {
  static void count(const T& part, RowEvidence& found) { count_part(part.data, found); }
  static T slice(const T& part, const Range& range) { return T{slice_part(part.data, range)}; }
  static void describe(const T& part, RowKind& kind) { describe_part(part.data, kind); }
  static void visit(const T& part, const Visit& visit) { visit_part(part.data, visit); }
};

/// Texts, numbers, and lists of them: an entry for each row, if anything has as many.
template <typename T>
struct IsPlain : std::bool_constant<Scalar<T>> {};
template <typename T>
struct IsPlain<std::vector<T>> : IsPlain<T> {};

template <typename T>
struct Part<std::vector<T>> : BuiltIn {
  static constexpr bool kSamples = Example<T> || TensorExample<T>;
  static void count(const std::vector<T>& part, RowEvidence& found) {
    if constexpr (kSamples) {
      add_rows(found, static_cast<int64_t>(part.size()));
    } else if constexpr (std::is_same_v<T, at::Tensor>) {
      add_list(found, part);
    } else if constexpr (IsPlain<T>::value) {  // such as labels
      found.lists.push_back({"numbers or texts",
                             static_cast<int64_t>(part.size()),
                             {},
                             false,
                             std::is_arithmetic_v<T> ? Entries::tensors : Entries::plain});
    } else {
      for (const T& item : part) {
        Part<T>::count(item, found);
      }
    }
  }
  static std::vector<T> slice(const std::vector<T>& part, const Range& range) {
    if constexpr (kSamples || IsPlain<T>::value) {
      return static_cast<int64_t>(part.size()) == range.rows ? entries(part, range) : part;
    } else {
      if constexpr (std::is_same_v<T, at::Tensor>) {
        if (are_rows(part, range.rows)) {
          return entries(part, range);
        }
      }
      std::vector<T> piece;
      for (const T& item : part) {
        piece.push_back(Part<T>::slice(item, range));
      }
      return piece;
    }
  }
  static std::vector<T> entries(const std::vector<T>& part, const Range& range) {
    return {part.begin() + range.begin, part.begin() + range.end};
  }
  static void describe(const std::vector<T>& part, RowKind& kind) {
    if constexpr (kSamples) {
      if (!part.empty()) {  // the first row speaks for all
        describe_sample(part.front().data, kind);
        if constexpr (Example<T>) {
          describe_sample(part.front().target, kind);
        }
      }
    } else {
      for (const T& item : part) {
        Part<T>::describe(item, kind);
      }
    }
  }
  static void visit(const std::vector<T>& part, const Visit& visit) {
    for (const T& item : part) {
      if constexpr (!IsPlain<T>::value) {
        visit_part(item, visit);
      }
    }
  }
  template <typename Field>
  static void describe_sample(const Field& field, RowKind& kind) {
    if constexpr (std::is_same_v<Field, at::Tensor>) {
      kind.add(field, std::nullopt);
    } else {
      describe_part(field, kind);
    }
  }
};

}  // namespace brimful::detail
