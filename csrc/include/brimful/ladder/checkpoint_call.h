#pragma once
// What checkpoint() is made of; included by checkpoint.h.
#include <ATen/core/Tensor.h>
#include <brimful/export.h>
#include <c10/util/Exception.h>

#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace brimful {

struct CheckpointOptions {
  /// The function draws the same random numbers when it runs again: states are kept of the default generators that it draws
  /// from.
  bool preserve_rng = true;
};

/// What checkpoint() throws, at once or from backward, where the function cannot be run again, or did not compute the same.
class BRIMFUL_API CannotRunAgain : public c10::ValueError {
 public:
  using c10::ValueError::ValueError;
};

namespace detail {
/// Visits the tensors in tensors, optionals, pairs, tuples and containers of them; nothing else.
template <typename Value, typename Visit>
void each_tensor(Value& value, const Visit& visit) {
  if constexpr (std::is_same_v<std::remove_const_t<Value>, at::Tensor>) {
    visit(value);
  } else if constexpr (requires {
                         requires std::is_same_v<std::remove_const_t<Value>,
                                                 std::optional<typename Value::value_type>>;
                       }) {
    if (value) {
      each_tensor(*value, visit);
    }
  } else if constexpr (requires { typename Value::mapped_type; }) {
    for (auto& element : value) {
      each_tensor(element.second, visit);
    }
  } else if constexpr (requires {
                         requires std::is_class_v<typename Value::value_type>;
                         requires std::is_lvalue_reference_v<decltype(*value.begin())>;
                       }) {
    for (auto& element : value) {
      each_tensor(element, visit);
    }
  } else if constexpr (requires { std::tuple_size<Value>::value; }) {
    std::apply([&](auto&... elements) { (each_tensor(elements, visit), ...); }, value);
  }
}

/// Modules in their holders or by shared pointers, torch::nn::AnyModule, and what can be called.
template <typename Fn, typename... Inputs>
auto call_function(Fn& fn, Inputs&... inputs) {
  if constexpr (requires { fn->forward(inputs...); }) {
    return fn->forward(inputs...);
  } else if constexpr (requires {
                         fn.ptr();
                         fn.forward(inputs...);
                       }) {
    return fn.forward(inputs...);
  } else {
    static_assert(
        std::is_invocable_v<Fn&, Inputs&...>,
        "checkpoint() runs a module's holder or shared_ptr, or what these inputs can be given to");
    return fn(inputs...);
  }
}

/// A function without inputs: it has them.
struct CheckpointCall {
  std::function<std::vector<at::Tensor>()> first;  ///< runs at once
  std::function<std::vector<at::Tensor>()> again;  ///< kept for backward
  std::vector<at::Tensor> inputs;
  /// Parameters and buffers by name, of a module.
  std::function<std::vector<std::pair<std::string, at::Tensor>>()> named;
};
/// The outputs of `first`, to be put in the place of those.
BRIMFUL_API std::vector<at::Tensor> run_checkpoint(CheckpointCall call,
                                                   const CheckpointOptions& options);

template <typename Fn>
auto named_tensors_of(const Fn& fn) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  if constexpr (requires {
                  fn->named_parameters();
                  fn->named_buffers();
                }) {
    for (const auto& item : fn->named_parameters()) {
      named.emplace_back(item.key(), item.value());
    }
    for (const auto& item : fn->named_buffers()) {
      named.emplace_back(item.key(), item.value());
    }
  }
  return named;
}
}  // namespace detail

}  // namespace brimful
