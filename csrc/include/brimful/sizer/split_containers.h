#pragma once
// How the standard library's containers are split, part by part; included by split.h.
#include <brimful/sizer/split_lists.h>

#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>

namespace brimful::detail {

template <typename T>
struct Part<std::optional<T>> : BuiltIn {
  static void count(const std::optional<T>& part, RowEvidence& found) {
    if (part) {
      Part<T>::count(*part, found);
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
  static void visit(const std::optional<T>& part, const Visit& visit) {
    if (part) {
      Part<T>::visit(*part, visit);
    }
  }
};

template <typename... T>
struct Part<std::variant<T...>> : BuiltIn {
  using Variant = std::variant<T...>;
  static void count(const Variant& part, RowEvidence& found) {
    std::visit([&](const auto& held) { count_part(held, found); }, part);
  }
  static Variant slice(const Variant& part, const Range& range) {
    return std::visit([&](const auto& held) { return Variant(slice_part(held, range)); }, part);
  }
  static void describe(const Variant& part, RowKind& kind) {
    std::visit([&](const auto& held) { describe_part(held, kind); }, part);
  }
  static void visit(const Variant& part, const Visit& visit) {
    std::visit([&](const auto& held) { visit_part(held, visit); }, part);
  }
};

template <typename Map>
struct MapPart : BuiltIn {
  static void count(const Map& part, RowEvidence& found) {
    for (const auto& [key, item] : part) {
      count_part(item, found);
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
  static void visit(const Map& part, const Visit& visit) {
    for (const auto& [key, item] : part) {
      visit_part(item, visit);
    }
  }
};
template <typename... T>
struct Part<std::map<T...>> : MapPart<std::map<T...>> {};
template <typename... T>
struct Part<std::unordered_map<T...>> : MapPart<std::unordered_map<T...>> {};

template <typename... T>
struct Part<std::tuple<T...>> : BuiltIn {
  static void count(const std::tuple<T...>& part, RowEvidence& found) {
    std::apply([&](const T&... item) { (Part<T>::count(item, found), ...); }, part);
  }
  static std::tuple<T...> slice(const std::tuple<T...>& part, const Range& range) {
    return std::apply(
        [&](const T&... item) { return std::tuple<T...>(Part<T>::slice(item, range)...); }, part);
  }
  static void describe(const std::tuple<T...>& part, RowKind& kind) {
    std::apply([&](const T&... item) { (Part<T>::describe(item, kind), ...); }, part);
  }
  static void visit(const std::tuple<T...>& part, const Visit& visit) {
    std::apply([&](const T&... item) { (Part<T>::visit(item, visit), ...); }, part);
  }
};

template <typename A, typename B>
struct Part<std::pair<A, B>> : BuiltIn {
  static void count(const std::pair<A, B>& part, RowEvidence& found) {
    Part<A>::count(part.first, found);
    Part<B>::count(part.second, found);
  }
  static std::pair<A, B> slice(const std::pair<A, B>& part, const Range& range) {
    return {slice_part(part.first, range), slice_part(part.second, range)};
  }
  static void describe(const std::pair<A, B>& part, RowKind& kind) {
    describe_part(part.first, kind);
    describe_part(part.second, kind);
  }
  static void visit(const std::pair<A, B>& part, const Visit& visit) {
    visit_part(part.first, visit);
    visit_part(part.second, visit);
  }
};

}  // namespace brimful::detail
