#include "sizer/pair_graph.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>
#include <utility>

#include "step/make_node.h"

namespace brimful::pairs {
namespace {
using torch::autograd::Node;
using torch::autograd::variable_list;

struct Seeds final : Node {
  explicit Seeds(variable_list gradients) : gradients_(std::move(gradients)) {}
  variable_list apply(variable_list&& /*seed*/) override { return std::move(gradients_); }
  void release_variables() override { gradients_.clear(); }
  std::string name() const override { return "BrimfulPairSeeds"; }

 private:
  variable_list gradients_;
};
}  // namespace

Reached reached_by(const at::Tensor& loss, uint64_t since) {
  Reached reached;
  std::unordered_set<Node*> seen;
  std::vector<Node*> open;
  const auto meet = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) {
      open.push_back(node);
    }
  };
  meet(torch::autograd::impl::gradient_edge(loss).function.get());
  while (!open.empty()) {
    auto* const node = open.back();
    open.pop_back();
    if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      reached.leaves.push_back(leaf->variable);
      continue;
    }
    reached.older = reached.older || node->sequence_nr() < since;
    for (const auto& edge : node->next_edges()) {
      meet(edge.function.get());
    }
  }
  return reached;
}

at::Tensor seeded(const at::Tensor& value, const std::vector<at::Tensor>& tensors,
                  std::vector<at::Tensor> gradients) {
  auto loss = value.detach().reshape({}).clone();
  auto node = make_node<Seeds>(std::move(gradients));
  for (const auto& tensor : tensors) {
    node->add_next_edge(torch::autograd::impl::gradient_edge(tensor));
  }
  torch::autograd::set_history(loss, node);
  return loss;
}

}  // namespace brimful::pairs
