#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <functional>
#include <memory>

namespace brimful {

/// Runs `began` in every backward that reaches `output`, before it goes on. False, and nothing, for an undefined
/// tensor, and for a leaf: it would keep the hook for good.
bool on_backward(const at::Tensor& output, std::function<void()> began);

/// A hook behind a node, for Node::add_post_hook: `fired` gets the gradients that the node took.
std::unique_ptr<torch::autograd::FunctionPostHook> after_node(
    std::function<void(const torch::autograd::variable_list&)> fired);

}  // namespace brimful
