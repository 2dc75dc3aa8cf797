#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "reducer/graph_hooks.h"

namespace brimful {

/// Hooks of autograd's accumulation of gradients.
class GradientHooks {
 public:
  /// `make`: the hook of a parameter, called after its gradient's accumulation.
  template <typename Make>
  void add(const std::vector<at::Tensor>& parameters, const Make& make) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      auto accumulator = torch::autograd::impl::grad_accumulator(parameters[i]);
      keys_.push_back(accumulator->add_post_hook(after_node(make(static_cast<int64_t>(i)))));
      accumulators_.push_back(std::move(accumulator));
    }
  }
  void remove() {
    for (size_t i = 0; i < keys_.size(); ++i) {
      accumulators_[i]->del_post_hook(keys_[i]);
    }
    keys_.clear();
  }
  /// Of the parameters, those that a backward with these inputs reaches.
  using Selected = std::unordered_map<torch::autograd::Node*, torch::autograd::GraphTask::ExecInfo>;
  size_t reached_by(const Selected& selected) const {
    size_t reached = 0;
    for (const auto& accumulator : accumulators_) {
      const auto found = selected.find(accumulator.get());
      reached += found != selected.end() && found->second.needed_ ? 1 : 0;
    }
    return reached;
  }

 private:
  using NodePtr =
      decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  std::vector<NodePtr> accumulators_;  ///< autograd holds them weakly
  std::vector<uintptr_t> keys_;
};

}  // namespace brimful
