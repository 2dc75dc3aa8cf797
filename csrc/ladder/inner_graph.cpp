#include "ladder/inner_graph.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>
#include <typeinfo>
#include <utility>

#include "ladder/refuse_second_run.h"
#include "step/make_node.h"

namespace brimful::ladder {
namespace {
using torch::autograd::AccumulateGrad;
using torch::autograd::CopySlices;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::InputMetadata;
using torch::autograd::Node;
using torch::autograd::variable_list;

/// The leaf's node, if `node` casts a leaf.
const Node* leaf_of_cast(const Node& node) {
  // Its class is declared in a header that costs more than this file; the names of types are mangled.
  static constexpr char kCast[] = "N5torch8autograd9generated15ToCopyBackward0E";
  if (std::strcmp(typeid(node).name(), kCast) != 0 || node.num_outputs() != 1) {
    return nullptr;
  }
  return dynamic_cast<const AccumulateGrad*>(node.next_edge(0).function.get());
}

struct Skeleton : Node {
  Skeleton(const Node& node, edge_list&& edges, std::shared_ptr<bool> was_run)
      : Node(node.sequence_nr(), std::move(edges)), was_run_(std::move(was_run)) {
    for (uint32_t i = 0; i < node.num_inputs(); ++i) {
      input_metadata_.emplace_back(node.input_metadata(i));
    }
  }
  variable_list apply(variable_list&& /*gradients*/) override {
    *was_run_ = true;
    refuse_second_run(
        "backward reached a tensor that was made inside of a checkpoint, which keeps none "
        "(tensor: neither an input nor an output of the function); return it from the function, "
        "or run its backward inside");
  }

 private:
  std::shared_ptr<bool> was_run_;
};

/// Where a gradient over the border is caught, in the place of the node that would get it.
struct Catch : Node {
  explicit Catch(const InputMetadata& metadata) : Node(std::numeric_limits<uint64_t>::max()) {
    input_metadata_.emplace_back(metadata);
  }
  variable_list apply(variable_list&& /*gradients*/) override { return {}; }
};

void set_edge(const BorderEdge& place, const Edge& edge) {
  place.from->next_edges()[place.index] = edge;
  // An operation in place on a view runs another node within, which computes what that node's own edges ask for.
  if (auto* slices = dynamic_cast<CopySlices*>(place.from)) {
    const auto& inner = slices->fn;  // gone once it has run
    if (inner && place.index > 0 && place.index < inner->num_outputs()) {
      inner->next_edges()[place.index] = edge;
    }
  }
}

/// While it lives, gradients are caught at the border: the graph is this thread's own.
class CaughtAtBorder {
 public:
  explicit CaughtAtBorder(const std::vector<BorderEdge>& edges) : edges_(edges) {
    for (const auto& edge : edges) {
      caught_.emplace_back(make_node<Catch>(edge.to.function->input_metadata(edge.to.input_nr)), 0);
    }
    for (size_t i = 0; i < edges.size(); ++i) {
      set_edge(edges[i], caught_[i]);
    }
  }
  ~CaughtAtBorder() {
    for (const auto& edge : edges_) {
      set_edge(edge, edge.to);
    }
  }
  CaughtAtBorder(const CaughtAtBorder&) = delete;
  CaughtAtBorder& operator=(const CaughtAtBorder&) = delete;

  const Edge& at(size_t i) const { return caught_[i]; }

 private:
  const std::vector<BorderEdge>& edges_;
  edge_list caught_;
};
}  // namespace

InnerNodes::InnerNodes(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    if (tensor.defined() && tensor.requires_grad()) {
      // Also makes the node of a view anew whose base was changed, before counting begins.
      outside_.insert(torch::autograd::impl::gradient_edge(tensor).function.get());
    }
  }
  first_ = at::sequence_number::peek();
  thread_ = at::RecordFunction::currentThreadId();
}

bool InnerNodes::contains(const Node& node) const {
  const auto number = node.sequence_nr();
  return number >= first_ && number != std::numeric_limits<uint64_t>::max() &&
         node.thread_id() == thread_ && outside_.count(&node) == 0;
}

bool InnerNodes::is_border(const Node& node) const {
  return !contains(node) || leaf_of_cast(node) != nullptr;
}

std::vector<BorderEdge> border_edges(const std::vector<NodePointer>& roots,
                                     const InnerNodes& inner) {
  std::vector<BorderEdge> found;
  std::vector<Node*> waiting;
  std::unordered_set<const Node*> seen;
  const auto visit = [&](Node* node) {
    if (seen.insert(node).second) {
      waiting.push_back(node);
    }
  };
  for (const auto& root : roots) {
    visit(root.get());
  }
  while (!waiting.empty()) {
    auto* node = waiting.back();
    waiting.pop_back();
    for (uint32_t i = 0; i < node->num_outputs(); ++i) {
      const auto& next = node->next_edge(i);
      if (!next.is_valid()) {
        continue;
      }
      if (inner.is_border(*next.function)) {
        found.push_back({node, i, next});
      } else {
        visit(next.function.get());
      }
    }
  }
  // The engine runs nodes from the newest to the oldest.
  std::sort(found.begin(), found.end(), [](const BorderEdge& a, const BorderEdge& b) {
    return std::make_tuple(~a.from->sequence_nr(), a.index) <
           std::make_tuple(~b.from->sequence_nr(), b.index);
  });
  return found;
}

bool same_target(const Edge& a, const Edge& b) {
  if (a.input_nr != b.input_nr) {
    return false;
  }
  if (a.function == b.function) {
    return true;
  }
  const auto* leaf = leaf_of_cast(*a.function);
  return leaf != nullptr && leaf == leaf_of_cast(*b.function) &&
         a.function->input_metadata(0).dtype() == b.function->input_metadata(0).dtype();
}

Skeletons::Skeletons(const InnerNodes& inner)
    : inner_(inner), was_run_(std::make_shared<bool>(false)) {}

Skeletons::~Skeletons() {
  for (const auto& [number, skeleton] : made_) {  // or a long chain of them would end by recursion
    skeleton->next_edges().clear();
  }
}

bool Skeletons::is_to_be_cut(const Node* node) const {
  return node != nullptr && dynamic_cast<const Skeleton*>(node) == nullptr &&
         !inner_.is_border(*node);
}

/// False if nodes have to be made first, which are now waiting.
bool Skeletons::make(const NodePointer& node, std::vector<NodePointer>& waiting) {
  edge_list edges = node->next_edges();
  bool complete = true;
  for (auto& edge : edges) {
    if (!is_to_be_cut(edge.function.get())) {
      continue;
    }
    const auto made = made_.find(edge.function->sequence_nr());
    if (made == made_.end()) {
      waiting.push_back(edge.function);
      complete = false;
    } else {
      edge.function = made->second;
    }
  }
  if (complete) {
    made_[node->sequence_nr()] = make_node<Skeleton>(*node, std::move(edges), was_run_);
  }
  return complete;
}

NodePointer Skeletons::of(const NodePointer& root) {
  std::vector<NodePointer> waiting{root};
  while (!waiting.empty()) {
    const auto node = waiting.back();
    if (made_.count(node->sequence_nr()) != 0 || make(node, waiting)) {
      waiting.pop_back();
    }
  }
  return made_.at(root->sequence_nr());
}

void Skeletons::cut(const at::Tensor& tensor) {
  if (!tensor.requires_grad() || tensor.is_leaf()) {
    return;
  }
  const auto edge = torch::autograd::impl::gradient_edge(tensor);
  if (is_to_be_cut(edge.function.get())) {
    torch::autograd::impl::set_gradient_edge(tensor, {of(edge.function), edge.input_nr});
  }
  if (tensor.is_view()) {  // an operation in place on it has changed the node of its base
    cut(at::Tensor(tensor._base()));
  }
}

variable_list gradients_over_border(const edge_list& roots,
                                    const std::vector<at::Tensor>& gradients,
                                    const std::vector<BorderEdge>& edges,
                                    const std::vector<bool>& needed, bool create_graph) {
  const CaughtAtBorder caught(edges);
  edge_list wanted;
  for (size_t i = 0; i < edges.size(); ++i) {
    if (needed[i]) {
      wanted.push_back(caught.at(i));
    }
  }
  variable_list result(edges.size());
  if (wanted.empty() || roots.empty()) {
    return result;
  }
  auto found = torch::autograd::Engine::get_default_engine().execute(
      roots, gradients, /*keep_graph=*/create_graph, create_graph, /*accumulate_grad=*/false,
      wanted);
  size_t next = 0;
  for (size_t i = 0; i < edges.size(); ++i) {
    if (needed[i]) {
      result[i] = std::move(found[next++]);
    }
  }
  return result;
}

}  // namespace brimful::ladder
