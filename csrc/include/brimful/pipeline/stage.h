#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <brimful/export.h>
#include <brimful/pipeline/call_stage.h>
#include <brimful/pipeline/value.h>
#include <brimful/sizer/batch_norm.h>
#include <brimful/step/forward_state.h>

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}
namespace torch::jit {
struct Module;
}

namespace brimful::pipeline {

/// One part of a model, run by one thread.
struct Stage {
  std::string name;
  /// Called by the stage's thread, with the caller's grad mode, autocast and dispatch state. What it takes is what the
  /// stage before returned, cut off from its graph.
  std::function<Value(const Value& input)> forward;
  std::vector<at::Tensor> parameters;  ///< trained or not
  std::vector<at::Tensor> buffers;     ///< put back when a step is repeated
  /// Where forward may put other buffers: what is put back then, and what a second forward in backward finds. Optional.
  std::shared_ptr<TensorNames> names;
  std::vector<BatchNormModule> batch_norms;
};

namespace detail {
using NamedIValues = std::unordered_map<std::string, c10::IValue>;
/// Of the step's keywords those of these names.
BRIMFUL_API NamedIValues keywords_named(const std::vector<std::string>& names);

/// In the module and below.
BRIMFUL_API std::vector<BatchNormModule> batch_norms_in(torch::nn::Module& module);
BRIMFUL_API std::shared_ptr<TensorNames> names_in(const torch::jit::Module& module);
}  // namespace detail

/// A stage of anything that can be called with one to three tensors, a vector of tensors, a Value or an IValue, and
/// returns a tensor, a vector, pair or tuple of tensors, a Value or an IValue.
template <typename Fn>
Stage make_stage(Fn fn, std::vector<at::Tensor> parameters = {},
                 std::vector<at::Tensor> buffers = {}, std::string name = "") {
  Stage stage;
  stage.name = std::move(name);
  stage.forward = [fn = std::move(fn)](const Value& input) mutable {
    return detail::call_stage(fn, input);
  };
  stage.parameters = std::move(parameters);
  stage.buffers = std::move(buffers);
  return stage;
}

/// A stage of a module as torch::nn has them: a holder or a shared pointer of what has forward(), parameters() and
/// buffers(). It is kept alive. What BatchNorms a module of torch::nn has, the pipeline's policy is for.
template <typename Module>
requires requires(Module& module) {
  module->parameters();
  module->buffers();
}
Stage stage_of(Module module, std::string name = "") {
  const auto parameters = module->parameters();
  const auto buffers = module->buffers();
  auto call = [module](const std::same_as<at::Tensor> auto&... inputs) mutable
      -> decltype(std::declval<Module&>()->forward(inputs...)) {
    return module->forward(inputs...);
  };
  auto stage = make_stage(std::move(call), {parameters.begin(), parameters.end()},
                          {buffers.begin(), buffers.end()}, std::move(name));
  stage.names = names_of([module]() mutable {
    const auto now = module->buffers();
    return std::vector<at::Tensor>(now.begin(), now.end());
  });
  if constexpr (std::is_base_of_v<torch::nn::Module, std::remove_cvref_t<decltype(*module)>>) {
    stage.batch_norms = detail::batch_norms_in(*module);
  }
  return stage;
}

/// A stage of a torch::jit::Module, or of what else takes a vector of IValues and has lists of parameters and buffers.
/// A value of several tensors, or a tuple, is given as several arguments; of the step's keywords those that its forward
/// names.
template <typename Module>
requires requires(Module& module, std::vector<c10::IValue> inputs) {
  { module.forward(inputs) } -> std::convertible_to<c10::IValue>;
  module.parameters();
  module.buffers();
}
Stage stage_of(Module module, std::string name = "") {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> buffers;
  for (const at::Tensor& parameter : module.parameters()) {
    parameters.push_back(parameter);
  }
  for (const at::Tensor& buffer : module.buffers()) {
    buffers.push_back(buffer);
  }
  std::vector<std::string> names;
  if constexpr (requires { module.get_method("forward").function().getSchema(); }) {
    for (const auto& argument : module.get_method("forward").function().getSchema().arguments()) {
      names.push_back(argument.name());
    }
  }
  std::shared_ptr<TensorNames> of_buffers;
  if constexpr (std::is_convertible_v<const Module&, const torch::jit::Module&>) {
    of_buffers = detail::names_in(module);
  }
  auto call = [module, names](const Value& input) mutable {
    const auto whole = to_ivalue(input);
    std::vector<c10::IValue> inputs{whole};
    if (whole.isTuple()) {
      const auto& elements = whole.toTupleRef().elements();
      inputs.assign(elements.begin(), elements.end());
    }
    if constexpr (requires { module.forward(inputs, detail::NamedIValues()); }) {
      return value_of(module.forward(std::move(inputs), detail::keywords_named(names)));
    } else {
      return value_of(module.forward(std::move(inputs)));
    }
  };
  auto stage =
      make_stage(std::move(call), std::move(parameters), std::move(buffers), std::move(name));
  stage.names = std::move(of_buffers);
  return stage;
}

}  // namespace brimful::pipeline
