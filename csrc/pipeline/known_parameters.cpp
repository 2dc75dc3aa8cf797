#include "pipeline/known_parameters.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

namespace brimful::pipeline {

void require_known(const std::vector<at::Tensor>& outputs,
                   const std::vector<const std::vector<at::Tensor>*>& known, int stage) {
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
  int unknown = 0;
  at::Tensor example;
  while (!left.empty()) {
    const auto* node = left.back();
    left.pop_back();
    if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node)) {
      const bool is_known = leaves.count(leaf->variable.unsafeGetTensorImpl()) > 0;
      unknown += is_known ? 0 : 1;
      example = is_known ? example : leaf->variable;
    }
    for (const auto& edge : node->next_edges()) {
      visit(edge.function.get());
    }
  }
  TORCH_CHECK_VALUE(unknown == 0,
                    "a stage uses parameters that the pipeline does not know of (stage: ", stage,
                    ", parameters: ", unknown, ", shape of one: ", example.sizes(),
                    "); pass the stage as a module that has them, or name them with the stage");
}

}  // namespace brimful::pipeline
