#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/ladder/checkpoint_call.h>

#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace brimful {

/// Activation checkpointing: what `function(inputs...)` returns, but nothing that it saves for backward is held. Backward runs
/// the function once more, with the same random numbers and autocast, and returns the gradients of the inputs and of whatever
/// the function reads, bit for bit as without checkpoint(). What else the function changes in place, such as BatchNorm's
/// statistics, is as after one run.
///
/// `function`: a holder or shared_ptr of a torch::nn module, AnyModule, or anything that can be called. It is copied (or moved)
/// and kept until backward has run, and so are the inputs: capture by value or outlive backward. Inputs are of any types;
/// outputs are tensors, optionals, pairs, tuples and containers of them. Under NoGradGuard this is a plain call.
/// The function must compute the same when it runs again. Generators of the program's own, and changed values that are no
/// tensors, are not put back. A tensor that it makes and does not return has no graph outside of it.
///
/// From any thread, also from several at the same time with different functions; default generators are shared between threads.
/// Does not wait for a device by itself. Backward may run several times (retain_graph) and with create_graph.
/// @throws what the function throws, at once and from backward; generators and what it changed in place are then put back
/// @throws CannotRunAgain (a c10::ValueError) at once if the function changes in place a tensor that has gradients; from backward if a tensor that it
/// reads was changed meanwhile, or if the second run reads other parameters or returns other outputs than the first
template <typename Fn, typename... Inputs>
auto checkpoint(const CheckpointOptions& options, Fn&& function, Inputs&&... inputs) {
  struct Kept {
    std::decay_t<Fn> fn;
    std::tuple<std::decay_t<Inputs>...> inputs;
  };
  const auto kept = std::shared_ptr<Kept>(
      new Kept{std::forward<Fn>(function), {std::forward<Inputs>(inputs)...}});
  const auto call = [](Kept& it) {
    auto copies = it.inputs;  // the function may assign to its arguments
    return std::apply([&](auto&... each) { return detail::call_function(it.fn, each...); }, copies);
  };
  const auto tensors_in = [](auto& value) {
    std::vector<at::Tensor> tensors;
    detail::each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
    return tensors;
  };
  using Result = decltype(call(*kept));
  static_assert(!std::is_void_v<Result>, "checkpoint() needs a function that returns tensors");
  std::optional<Result> result;
  auto outputs = detail::run_checkpoint(
      {[&] { return tensors_in(result.emplace(call(*kept))); },
       [=] {
         auto again = call(*kept);
         return tensors_in(again);
       },
       tensors_in(kept->inputs), [=] { return detail::named_tensors_of(kept->fn); }},
      options);
  auto next = outputs.begin();
  detail::each_tensor(*result, [&](at::Tensor& tensor) { tensor = std::move(*next++); });
  return std::move(*result);
}

template <typename Fn, typename... Inputs>
requires(!std::is_same_v<std::remove_cvref_t<Fn>, CheckpointOptions>) auto checkpoint(
    Fn&& function, Inputs&&... inputs) {
  return checkpoint(CheckpointOptions(), std::forward<Fn>(function),
                    std::forward<Inputs>(inputs)...);
}

}  // namespace brimful
