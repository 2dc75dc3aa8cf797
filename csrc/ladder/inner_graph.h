#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace brimful::ladder {

using NodePointer = decltype(torch::autograd::Edge::function);

/// The nodes that this thread makes from now on: the inside of a graph, whose border is what was there before.
class InnerNodes {
 public:
  /// `tensors` are outside, however their nodes are numbered.
  explicit InnerNodes(const std::vector<at::Tensor>& tensors);

  bool contains(const torch::autograd::Node& node) const;
  /// A leaf, a node from before, or the cast of a leaf: autocast keeps casts for what comes outside, which accumulates there
  /// in the lower precision.
  bool is_border(const torch::autograd::Node& node) const;

 private:
  uint64_t first_;
  uint64_t thread_;
  std::unordered_set<const torch::autograd::Node*> outside_;
};

/// An edge over the border, by which an inner node hands a gradient out.
struct BorderEdge {
  torch::autograd::Node* from = nullptr;
  uint32_t index = 0;  ///< of its next_edges()
  torch::autograd::Edge to;
};

/// The edges over the border that backward reaches from `roots`, in the order in which it hands gradients out.
std::vector<BorderEdge> border_edges(const std::vector<NodePointer>& roots,
                                     const InnerNodes& inner);

/// True if what two runs of a function found is the same leaf, node, or cast of a leaf.
bool same_target(const torch::autograd::Edge& a, const torch::autograd::Edge& b);

/// Copies of inner nodes that have their edges, and nothing of what the nodes saved. They cannot run.
class Skeletons {
 public:
  explicit Skeletons(const InnerNodes& inner);
  ~Skeletons();
  Skeletons(const Skeletons&) = delete;
  Skeletons& operator=(const Skeletons&) = delete;

  /// Where `tensor` has a node that is no skeleton, it gets one: with the node go the tensors that it saved.
  void cut(const at::Tensor& tensor);
  /// True if backward came upon one.
  bool was_run() const { return *was_run_; }

 private:
  NodePointer of(const NodePointer& root);
  bool is_to_be_cut(const torch::autograd::Node* node) const;
  bool make(const NodePointer& node, std::vector<NodePointer>& waiting);

  const InnerNodes& inner_;
  std::shared_ptr<bool> was_run_;
  std::unordered_map<uint64_t, NodePointer> made_;  ///< by sequence number
};

/// The gradients over `edges` where `needed`, when `roots` have `gradients`. Neither leaves nor nodes outside run, nor do
/// their hooks.
torch::autograd::variable_list gradients_over_border(const torch::autograd::edge_list& roots,
                                                     const std::vector<at::Tensor>& gradients,
                                                     const std::vector<BorderEdge>& edges,
                                                     const std::vector<bool>& needed,
                                                     bool create_graph);

}  // namespace brimful::ladder
