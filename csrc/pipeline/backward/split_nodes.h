#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>

/// What a backward that is split puts into a graph.
namespace brimful::pipeline {

/// Frees what the node has saved when it has run.
void release_after_run(torch::autograd::Node& node);

/// Keeps in `kept` the gradients that the node is given, as its hooks leave them.
void keep_gradients(torch::autograd::Node& node,
                    std::shared_ptr<torch::autograd::variable_list> kept);

/// Takes away all hooks that run before the node, keep_gradients()'s among them.
void drop_hooks_before(torch::autograd::Node& node) noexcept;

/// Puts a node of no effect into this edge, so that what flows there can be captured before the hooks of the node behind
/// run. Returns the edge to it; `target` is where the edge led.
torch::autograd::Edge put_relay(torch::autograd::Node& node, uint32_t edge,
                                torch::autograd::Edge& target);

}  // namespace brimful::pipeline
