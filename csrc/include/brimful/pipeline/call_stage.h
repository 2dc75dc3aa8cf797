#pragma once
// How a stage calls what it is made of; included by stage.h.
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <brimful/pipeline/value.h>

#include <concepts>
#include <type_traits>
#include <vector>

namespace brimful::pipeline::detail {

// An IValue can be made of a tensor, so that what takes one can be called with a tensor: ask for the type itself.
template <typename Signature>
struct FirstArgument {};
template <typename Result, typename First, typename... Rest>
struct FirstArgument<Result (*)(First, Rest...)> : std::type_identity<std::remove_cvref_t<First>> {
};
template <typename Result, typename Fn, typename First, typename... Rest>
struct FirstArgument<Result (Fn::*)(First, Rest...)>
    : std::type_identity<std::remove_cvref_t<First>> {};
template <typename Result, typename Fn, typename First, typename... Rest>
struct FirstArgument<Result (Fn::*)(First, Rest...) const>
    : std::type_identity<std::remove_cvref_t<First>> {};
template <typename Fn>
concept TakesIValue = std::same_as<typename FirstArgument<Fn>::type, c10::IValue> ||
    std::same_as<typename FirstArgument<decltype(&Fn::operator())>::type, c10::IValue>;

template <typename Fn>
Value call_stage(Fn& fn, const Value& input) {
  const auto& tensors = input.tensors;
  const auto count = [&](size_t wanted) {
    TORCH_CHECK_TYPE(tensors.size() == wanted && input.form == nullptr,
                     "a stage takes another number of tensors than it got (takes: ", wanted,
                     ", got: ", shapes_of(tensors), ")");
  };
  if constexpr (TakesIValue<Fn>) {
    return value_of(fn(to_ivalue(input)));
  } else if constexpr (std::is_invocable_v<Fn&, at::Tensor>) {
    count(1);
    return value_of(fn(tensors[0]));
  } else if constexpr (std::is_invocable_v<Fn&, at::Tensor, at::Tensor>) {
    count(2);
    return value_of(fn(tensors[0], tensors[1]));
  } else if constexpr (std::is_invocable_v<Fn&, at::Tensor, at::Tensor, at::Tensor>) {
    count(3);
    return value_of(fn(tensors[0], tensors[1], tensors[2]));
  } else if constexpr (std::is_invocable_v<Fn&, const std::vector<at::Tensor>&>) {
    return value_of(fn(tensors));
  } else {
    static_assert(std::is_invocable_v<Fn&, const Value&>,
                  "a stage takes one to three tensors, a vector of them, a Value or an IValue");
    return value_of(fn(input));
  }
}

}  // namespace brimful::pipeline::detail
