#include "pipeline/backward/known_parameters.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

namespace brimful::pipeline {

std::vector<at::Tensor> unknown_leaves(const std::vector<at::Tensor>& outputs,
                                       const std::vector<const std::vector<at::Tensor>*>& known) {
  using torch::autograd::Node;
  std::unordered_set<const c10::TensorImpl*> leaves;
  for (const auto* tensors : known) {
    for (const auto& tensor : *tensors) {
      leaves.insert(tensor.unsafeGetTensorImpl());
    }
  }
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> left;
  const auto visit = [&](const Node* node) {
    if (node != nullptr && seen.insert(node).second) {
      left.push_back(node);
    }
  };
  for (const auto& output : outputs) {
    if (output.defined()) {
      const auto edge = torch::autograd::impl::gradient_edge(output);
      visit(edge.function.get());
    }
  }
  std::vector<at::Tensor> unknown;
  while (!left.empty()) {
    const auto* node = left.back();
    left.pop_back();
    if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node)) {
      if (leaves.count(leaf->variable.unsafeGetTensorImpl()) == 0) {
        unknown.push_back(leaf->variable);
      }
    }
    for (const auto& edge : node->next_edges()) {
      visit(edge.function.get());
    }
  }
  return unknown;
}

void KnownParameters::check(const std::vector<at::Tensor>& outputs,
                            const std::vector<const std::vector<at::Tensor>*>& known, int stage) {
  const auto unknown = unknown_leaves(outputs, known);
  if (checked_++ == 0) {
    for (const auto& leaf : unknown) {
      first_.emplace_back(leaf.getIntrusivePtr());
    }
    return;
  }
  int lasting = 0;
  at::Tensor example;
  for (const auto& leaf : unknown) {
    for (const auto& before : first_) {
      if (!before.expired() && before._unsafe_get_target() == leaf.unsafeGetTensorImpl()) {
        ++lasting;
        example = leaf;
      }
    }
  }
  if (lasting > 0) {
    checked_ = 0;  // a step that follows is refused as well
  }
  first_.clear();
  TORCH_CHECK_VALUE(lasting == 0,
                    "a stage uses parameters that the pipeline does not know of (stage: ", stage,
                    ", parameters: ", lasting,
                    ", shape of one: ", example.defined() ? example.sizes() : at::IntArrayRef(),
                    "); pass the stage as a module that has them, or name them with the stage");
}

}  // namespace brimful::pipeline
