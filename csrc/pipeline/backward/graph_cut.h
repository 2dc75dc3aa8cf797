#pragma once
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <string>
#include <vector>

namespace brimful::pipeline {

/// What a node of a stage's graph does in a backward that is split.
enum class Role : uint8_t {
  weight,  ///< leads to no input: runs in W
  input,   ///< an input's AccumulateGrad: its gradient is the result of I
  inner,   ///< leads to inputs alone: runs in I
  shared,  ///< leads to both, and can run for each side by itself: in I and in W
  once  ///< leads to both, and may run but once, or had better: in I, which keeps what it has for W
};

/// The graph between a stage's outputs and its leaves. Plain data about nodes that the caller keeps alive.
struct GraphCut {
  struct Link {
    int32_t from = 0;  ///< index in `nodes`
    int32_t edge = 0;  ///< of its next_edges()
    int32_t to = 0;    ///< index in `nodes`
  };

  std::vector<torch::autograd::Node*> nodes;
  std::vector<Role> roles;  ///< of each node
  std::vector<Link> links;
  std::vector<int32_t> roots;  ///< the node of each root
  bool reaches_input = false;
  bool has_shared = false;
  /// Why the backward must not be split; empty if it may be.
  std::string obstacle;
  /// Of Role::once, the functions that may not run twice, for people.
  std::string once_names;

  Role role_of_root(size_t root) const { return roles[static_cast<size_t>(roots[root])]; }
};

/// Walks the graph once. `inputs` are edges to AccumulateGrad nodes.
GraphCut cut_graph(const torch::autograd::edge_list& roots,
                   const torch::autograd::edge_list& inputs);

/// Whether a reentrant checkpoint of torch's is in the graph, which runs only where all gradients go to leaves.
bool has_reentrant_checkpoint(const std::vector<at::Tensor>& outputs);

/// True for the nodes that torch generates, which compute what their edges ask for and nothing besides. False for all
/// that a person has written, which may accumulate or communicate by itself.
bool is_generated(const torch::autograd::Node& node);

}  // namespace brimful::pipeline
