#include "pipeline/backward/graph_cut.h"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <typeinfo>
#include <unordered_set>
#include <vector>

namespace brimful::pipeline {
namespace {
using torch::autograd::edge_list;
using torch::autograd::Node;

// Of Python's functions the name alone can be asked without Python's GIL.
constexpr const char* kReentrantCheckpoint = "CheckpointFunctionBackward";
constexpr const char* kCompiled = "CompiledFunctionBackward";

/// Depth first, without recursion: a graph may be thousands of nodes deep.
class Walk {
 public:
  explicit Walk(GraphCut& cut) : cut_(cut) {}

  void mark_input(Node* node) {
    if (index_.emplace(node, size()).second) {
      append(node, Role::input);
    }
  }

  int32_t visit(Node* root) {
    const auto known = index_.find(root);
    if (known != index_.end()) {
      return known->second;
    }
    const auto first = enter(root);
    while (!open_.empty()) {
      step();
    }
    return first;
  }

 private:
  struct Open {
    int32_t node = 0;
    int32_t next_edge = 0;
    size_t first_link = 0;
  };

  int32_t size() const { return static_cast<int32_t>(cut_.nodes.size()); }

  void append(Node* node, Role role) {
    cut_.nodes.push_back(node);
    cut_.roles.push_back(role);
  }

  int32_t enter(Node* node) {
    const auto index = size();
    index_.emplace(node, index);
    append(node, Role::weight);
    open_.push_back({index, 0});
    return index;
  }

  void step() {
    auto& top = open_.back();
    const auto& edges = cut_.nodes[static_cast<size_t>(top.node)]->next_edges();
    if (static_cast<size_t>(top.next_edge) == edges.size()) {
      open_.pop_back();
      return;
    }
    const auto& edge = edges[static_cast<size_t>(top.next_edge)];
    if (!edge.is_valid()) {
      ++top.next_edge;
      return;
    }
    const auto known = index_.find(edge.function.get());
    if (known == index_.end()) {
      enter(edge.function.get());  // this edge is looked at again when that is done
      return;
    }
    cut_.links.push_back({top.node, top.next_edge, known->second});
    if (cut_.roles[static_cast<size_t>(known->second)] != Role::weight) {
      cut_.roles[static_cast<size_t>(top.node)] = Role::inner;
    }
    ++top.next_edge;
  }

  GraphCut& cut_;
  ska::flat_hash_map<Node*, int32_t> index_;
  std::vector<Open> open_;
};

bool may_run_twice(const Node& node) {
  return is_generated(node) && node.post_hooks().empty();
}

/// A scale or a shift: its gradient is a sum that comes with the inputs' gradients at little cost, and is much smaller
/// than what would have to be kept to compute it later.
bool is_vector(const Node& node) {
  const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(&node);
  return leaf != nullptr && leaf->variable.dim() <= 1;
}

void add_name(std::string& names, const std::string& name) {
  if (names.find(name) == std::string::npos) {
    names += (names.empty() ? "" : ", ") + name;
  }
}

void find_roles(GraphCut& cut) {
  std::vector<bool> gives_vectors(cut.nodes.size(), false);
  for (const auto& link : cut.links) {
    const auto from = static_cast<size_t>(link.from);
    const auto to = static_cast<size_t>(link.to);
    auto& role = cut.roles[from];
    if (role == Role::weight || role == Role::once || cut.roles[to] != Role::weight) {
      continue;
    }
    if (!may_run_twice(*cut.nodes[from])) {
      role = Role::once;
      add_name(cut.once_names, cut.nodes[from]->name());
    } else if (is_vector(*cut.nodes[to])) {
      gives_vectors[from] = true;
    } else {
      role = Role::shared;
      cut.has_shared = true;
    }
  }
  for (size_t i = 0; i < cut.nodes.size(); ++i) {
    if (gives_vectors[i] && cut.roles[i] == Role::inner) {
      cut.roles[i] = Role::once;
    }
  }
}

std::string obstacle_in(const GraphCut& cut) {
  for (size_t i = 0; i < cut.nodes.size(); ++i) {
    if (cut.roles[i] == Role::weight || cut.roles[i] == Role::input ||
        is_generated(*cut.nodes[i])) {
      continue;
    }
    const auto name = cut.nodes[i]->name();
    if (name == kReentrantCheckpoint) {
      return "a reentrant checkpoint runs its parameters' backward within its own (" + name +
             "); checkpoint with use_reentrant=False";
    }
    if (cut.has_shared && name == kCompiled) {
      return "a compiled backward (" + name + ") runs once, and as a whole";
    }
  }
  if (!cut.has_shared && !cut.once_names.empty()) {
    return "what gives the parameters their gradients runs once, and as a whole (" +
           cut.once_names + ")";
  }
  return "";
}
}  // namespace

bool is_generated(const Node& node) {
  // The names of types are mangled: torch::autograd::generated::.
  static constexpr char kPrefix[] = "N5torch8autograd9generated";
  return std::strncmp(typeid(node).name(), kPrefix, sizeof(kPrefix) - 1) == 0;
}

GraphCut cut_graph(const edge_list& roots, const edge_list& inputs) {
  GraphCut cut;
  Walk walk(cut);
  for (const auto& input : inputs) {
    walk.mark_input(input.function.get());
  }
  for (const auto& root : roots) {
    cut.roots.push_back(walk.visit(root.function.get()));
    cut.reaches_input |= cut.role_of_root(cut.roots.size() - 1) != Role::weight;
  }
  find_roles(cut);
  if (cut.reaches_input) {
    cut.obstacle = obstacle_in(cut);
  }
  return cut;
}

bool has_reentrant_checkpoint(const std::vector<at::Tensor>& outputs) {
  std::vector<Node*> waiting;
  std::unordered_set<const Node*> seen;
  const auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) {
      waiting.push_back(node);
    }
  };
  for (const auto& output : outputs) {
    if (output.defined() && output.requires_grad()) {
      visit(torch::autograd::impl::gradient_edge(output).function.get());
    }
  }
  while (!waiting.empty()) {
    auto* node = waiting.back();
    waiting.pop_back();
    if (!is_generated(*node) && node->name() == kReentrantCheckpoint) {
      return true;
    }
    for (const auto& edge : node->next_edges()) {
      visit(edge.function.get());
    }
  }
  return false;
}

}  // namespace brimful::pipeline
