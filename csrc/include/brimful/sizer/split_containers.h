#pragma once
// How the standard library's containers are split, part by part; included by split.h.
#include <brimful/sizer/split_part.h>

#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace brimful::detail {

template <typename T>
struct Part<std::optional<T>> : BuiltIn {
  static void count(const std::optional<T>& part, Rows& rows) {
    if (part) {
      Part<T>::count(*part, rows);
    }
  }
  static std::optional<T> slice(const std::optional<T>& part, const Range& range) {
    return part ? std::optional<T>(Part<T>::slice(*part, range)) : std::nullopt;
  }
  static void describe(const std::optional<T>& part, RowKind& kind) {
    if (part) {
      Part<T>::describe(*part, kind);
    }
  }
};

template <typename... T>
struct Part<std::variant<T...>> : BuiltIn {
  using Variant = std::variant<T...>;
  static void count(const Variant& part, Rows& rows) {
    std::visit([&](const auto& held) { count_part(held, rows); }, part);
  }
  static Variant slice(const Variant& part, const Range& range) {
    return std::visit([&](const auto& held) { return Variant(slice_part(held, range)); }, part);
  }
  static void describe(const Variant& part, RowKind& kind) {
    std::visit([&](const auto& held) { describe_part(held, kind); }, part);
  }
};

template <typename T>
struct Part<std::vector<T>> : BuiltIn {
  static constexpr bool kSamples = Example<T> || TensorExample<T>;
  static void count(const std::vector<T>& part, Rows& rows) {
    if constexpr (kSamples) {
      add_rows(rows, static_cast<int64_t>(part.size()));
    } else {
      for (const T& item : part) {
        Part<T>::count(item, rows);
      }
    }
  }
  static std::vector<T> slice(const std::vector<T>& part, const Range& range) {
    if constexpr (kSamples || Scalar<T>) {
      return static_cast<int64_t>(part.size()) == range.rows
                 ? std::vector<T>(part.begin() + range.begin, part.begin() + range.end)
                 : part;
    } else {
      std::vector<T> piece;
      for (const T& item : part) {
        piece.push_back(Part<T>::slice(item, range));
      }
      return piece;
    }
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
  template <typename Field>
  static void describe_sample(const Field& field, RowKind& kind) {
    if constexpr (std::is_same_v<Field, at::Tensor>) {
      kind.add(field, std::nullopt);
    } else {
      describe_part(field, kind);
    }
  }
};

template <typename Map>
struct MapPart : BuiltIn {
  static void count(const Map& part, Rows& rows) {
    for (const auto& [key, item] : part) {
      count_part(item, rows);
    }
  }
  static Map slice(const Map& part, const Range& range) {
    Map piece;
    for (const auto& [key, item] : part) {
      piece.emplace(key, slice_part(item, range));
    }
    return piece;
  }
  static void describe(const Map& part, RowKind& kind) {
    for (const auto& [key, item] : part) {
      describe_part(item, kind);
    }
  }
};
template <typename... T>
struct Part<std::map<T...>> : MapPart<std::map<T...>> {};
template <typename... T>
struct Part<std::unordered_map<T...>> : MapPart<std::unordered_map<T...>> {};

template <typename... T>
struct Part<std::tuple<T...>> : BuiltIn {
  static void count(const std::tuple<T...>& part, Rows& rows) {
    std::apply([&](const T&... item) { (Part<T>::count(item, rows), ...); }, part);
  }
  static std::tuple<T...> slice(const std::tuple<T...>& part, const Range& range) {
    return std::apply(
        [&](const T&... item) { return std::tuple<T...>(Part<T>::slice(item, range)...); }, part);
  }
  static void describe(const std::tuple<T...>& part, RowKind& kind) {
    std::apply([&](const T&... item) { (Part<T>::describe(item, kind), ...); }, part);
  }
};

template <typename A, typename B>
struct Part<std::pair<A, B>> : BuiltIn {
  static void count(const std::pair<A, B>& part, Rows& rows) {
    Part<A>::count(part.first, rows);
    Part<B>::count(part.second, rows);
  }
  static std::pair<A, B> slice(const std::pair<A, B>& part, const Range& range) {
    return {slice_part(part.first, range), slice_part(part.second, range)};
  }
  static void describe(const std::pair<A, B>& part, RowKind& kind) {
    describe_part(part.first, kind);
    describe_part(part.second, kind);
  }
};

}  // namespace brimful::detail
