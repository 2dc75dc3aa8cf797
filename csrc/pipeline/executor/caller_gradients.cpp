#include "pipeline/executor/caller_gradients.h"

#include <ATen/ATen.h>
#include <brimful/memory/stats.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>

#include "pipeline/backward/known_parameters.h"
#include "pipeline/backward/run_engine.h"
#include "step/kept_gradients.h"

namespace brimful::pipeline {

at::Tensor moved(const at::Tensor& tensor, c10::Device device) {
  return tensor.to(device, /*non_blocking=*/!device.is_cpu());
}

at::Tensor leaf_of(const at::Tensor& tensor, c10::Device device, std::vector<CallerLeaf>* leaves) {
  if (!tensor.requires_grad()) {
    return moved(tensor, device);
  }
  auto leaf = moved(tensor.detach(), device);
  if (leaves != nullptr) {
    leaf.set_requires_grad(true);
    leaves->push_back({tensor, leaf});
  }
  return leaf;
}

void add_gradient(std::vector<CallerGradient>& gradients, const at::Tensor& tensor,
                  const at::Tensor& gradient) {
  if (!gradient.defined()) {
    return;
  }
  const auto found = std::find_if(gradients.begin(), gradients.end(),
                                  [&](const auto& each) { return each.tensor.is_same(tensor); });
  if (found == gradients.end()) {
    gradients.push_back({tensor, gradient});
  } else {
    const at::NoGradGuard no_grad;
    found->gradient = found->gradient + gradient;
  }
}

void give_back(const std::vector<CallerGradient>& gradients, double scale) {
  if (gradients.empty()) {
    return;
  }
  const memory::Unlimited unlimited;  // all ranks have accepted: no way back
  std::vector<at::Tensor> tensors;
  torch::autograd::edge_list edges;
  torch::autograd::variable_list seeds;
  for (const auto& [tensor, gradient] : gradients) {
    const at::NoGradGuard no_grad;
    const auto seed = moved(gradient, tensor.device());
    tensors.push_back(tensor);
    edges.push_back(torch::autograd::impl::gradient_edge(tensor));
    seeds.push_back(scale == 1 ? seed : seed * scale);
  }
  KeptGradients kept;
  const auto gradients_back = c10::make_scope_exit([&] { kept.give_back(); });
  kept.take(unknown_leaves(tensors, {}));
  run_engine(edges, seeds, Keep::nothing, {});
  kept.add();
}

}  // namespace brimful::pipeline
