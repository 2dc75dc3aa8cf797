#include "reducer/graph_hooks.h"

#include <torch/csrc/autograd/function.h>

#include <utility>

namespace brimful {
namespace {
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;

[[noreturn]] void refuse_compiled_autograd() {
  C10_THROW_ERROR(
      NotImplementedError,
      "compiled autograd would leave out the reduction of gradients (torch._dynamo.config."
      "compiled_autograd: True); switch it off for this backward: torch.compile compiles the "
      "forward "
      "and the backward of a model without it");
}

struct BeforeNode : torch::autograd::FunctionPreHook {
  explicit BeforeNode(std::function<void()> began) : began_(std::move(began)) {}
  variable_list operator()(const variable_list& gradients) override {
    began_();
    return gradients;
  }
  void compiled_args(CompiledNodeArgs& /*args*/) const override { refuse_compiled_autograd(); }

 private:
  std::function<void()> began_;
};

struct AfterNode : torch::autograd::FunctionPostHook {
  explicit AfterNode(std::function<void(const variable_list&)> fired) : fired_(std::move(fired)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    fired_(inputs);
    return outputs;
  }
  void compiled_args(CompiledNodeArgs& /*args*/) const override { refuse_compiled_autograd(); }

 private:
  std::function<void(const variable_list&)> fired_;
};
}  // namespace

bool on_backward(const at::Tensor& output, std::function<void()> began) {
  if (!output.defined()) {
    return false;
  }
  const auto& node = output.grad_fn();
  if (node) {
    node->add_tensor_pre_hook(std::make_unique<BeforeNode>(std::move(began)));
  }
  return node != nullptr;
}

std::unique_ptr<torch::autograd::FunctionPostHook> after_node(
    std::function<void(const variable_list&)> fired) {
  return std::make_unique<AfterNode>(std::move(fired));
}

}  // namespace brimful
