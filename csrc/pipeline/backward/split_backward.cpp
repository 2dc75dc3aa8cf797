#include <ATen/SequenceNumber.h>
#include <ATen/ops/ones_like.h>
#include <brimful/pipeline/split_backward.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <unordered_set>
#include <utility>

#include "pipeline/backward/graph_cut.h"
#include "pipeline/backward/run_engine.h"
#include "pipeline/backward/split_nodes.h"

namespace brimful::pipeline {
namespace {
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

bool takes_part(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}

struct Roots {
  edge_list edges;
  variable_list gradients;
};

Roots find_roots(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& gradients) {
  TORCH_CHECK_VALUE(gradients.empty() || gradients.size() == outputs.size(),
                    "each output needs a gradient, or none of them has one (outputs: ",
                    outputs.size(), ", gradients: ", gradients.size(), ")");
  Roots roots;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!takes_part(outputs[i])) {
      continue;
    }
    TORCH_CHECK_VALUE(!gradients.empty() || (outputs[i].numel() == 1 && !outputs[i].is_complex()),
                      "a gradient is needed for an output that is no real scalar (output: ", i,
                      ", shape: ", outputs[i].sizes(),
                      "); pass its gradient, or reduce it to a loss");
    if (gradients.empty() || gradients[i].defined()) {
      roots.edges.push_back(torch::autograd::impl::gradient_edge(outputs[i]));
      roots.gradients.push_back(gradients.empty() ? at::ones_like(outputs[i]) : gradients[i]);
    }
  }
  return roots;
}

void check_inputs(const std::vector<at::Tensor>& inputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK_VALUE(!inputs[i].defined() || inputs[i].is_leaf(),
                      "an input has a history (input: ", i, ", from: ", inputs[i].grad_fn()->name(),
                      "); detach it where the stage begins");
  }
}

/// The gradients that inputs have from elsewhere, aside while a backward gives them others.
class InputGradients {
 public:
  explicit InputGradients(const std::vector<at::Tensor>& inputs) {
    aside_.reserve(inputs.size());
    for (const auto& input : inputs) {
      if (takes_part(input)) {
        aside_.emplace_back(input, std::exchange(input.mutable_grad(), at::Tensor()));
      }
    }
  }
  /// Backwards: of an input that is there twice the first has what the input had.
  ~InputGradients() {
    for (auto at = aside_.rbegin(); at != aside_.rend(); ++at) {
      at->first.mutable_grad() = std::move(at->second);
    }
  }
  InputGradients(const InputGradients&) = delete;
  InputGradients& operator=(const InputGradients&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> aside_;
};

std::vector<at::Tensor> run_whole(const Roots& roots, const std::vector<at::Tensor>& inputs) {
  const InputGradients aside(inputs);
  if (!roots.edges.empty()) {
    run_engine(roots.edges, roots.gradients, Keep::nothing, {});
  }
  std::vector<at::Tensor> result;
  result.reserve(inputs.size());
  for (const auto& input : inputs) {
    result.push_back(takes_part(input) ? input.mutable_grad() : at::Tensor());
  }
  return result;
}
}  // namespace

struct WeightWork::Left {
  Roots roots;
};

WeightWork::WeightWork() noexcept = default;
WeightWork::~WeightWork() = default;
WeightWork::WeightWork(WeightWork&&) noexcept = default;
WeightWork& WeightWork::operator=(WeightWork&&) noexcept = default;

bool WeightWork::empty() const noexcept {
  return left_ == nullptr;
}

void WeightWork::run() {
  if (const auto left = std::move(left_)) {
    run_engine(left->roots.edges, left->roots.gradients, Keep::nothing, {});
  }
}

int64_t WeightWork::bytes() const {
  std::unordered_set<const c10::StorageImpl*> seen;
  int64_t bytes = 0;
  for (const auto& gradient : left_ ? left_->roots.gradients : variable_list()) {
    if (!gradient.defined()) {
      continue;
    }
    if (!gradient.has_storage()) {
      bytes += static_cast<int64_t>(gradient.nbytes());
    } else if (seen.insert(gradient.storage().unsafeGetStorageImpl()).second) {
      bytes += static_cast<int64_t>(gradient.storage().nbytes());
    }
  }
  return bytes;
}

namespace {
bool has_hooks_before(Node& node) {
  return !node.pre_hooks().empty() || !node.tensor_pre_hooks().empty() ||
         !node.retains_grad_hooks().empty();
}

/// Views save shapes alone.
bool may_hold_tensors(Node& node) {
  return !is_generated(node) || node.is_traceable();
}

/// From the gradients of those inputs that need one to those of all.
variable_list spread(variable_list&& gradients, const std::vector<at::Tensor>& inputs) {
  variable_list all(inputs.size());
  size_t next = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (takes_part(inputs[i])) {
      all[i] = std::move(gradients[next++]);
    }
  }
  return all;
}
}  // namespace

/// I: what it asks the engine for, and what it leaves for W. Cutting a graph ends what else could be done with it, so
/// that is done when nothing can fail any more.
struct InputPass {
  InputPass(Roots roots, edge_list inputs, const GraphCut& cut)
      : cut_(cut), inputs_(inputs.size()), captured_(std::move(inputs)) {
    for (size_t i = 0; i < roots.edges.size(); ++i) {
      auto& side = cut.role_of_root(i) == Role::weight ? left_ : roots_;
      side.edges.push_back(std::move(roots.edges[i]));
      side.gradients.push_back(std::move(roots.gradients[i]));
    }
    for (size_t i = 0; i < cut.nodes.size() && cut.has_shared; ++i) {
      prepare(*cut.nodes[i], cut.roles[i]);
    }
    for (const auto& link : cut.links) {
      if (role(link.from) == Role::once && role(link.to) == Role::weight) {
        captured_.push_back(put_relay(node(link.from), link.edge, begin_.emplace_back()));
      }
    }
  }

  InputBackward run() {
    const auto before = at::sequence_number::peek();
    InputBackward result;
    variable_list gradients(inputs_);
    if (cut_.reaches_input) {
      gradients = run_engine(roots_.edges, roots_.gradients,
                             cut_.has_shared ? Keep::graph : Keep::nothing, captured_);
    }
    // The engine numbers one node of its own.
    result.recomputed = at::sequence_number::peek() > before + 1;
    keep(gradients);
    gradients.resize(inputs_);
    result.input_gradients = std::move(gradients);
    if (!left_.edges.empty()) {
      result.weight_work.left_ =
          std::make_unique<WeightWork::Left>(WeightWork::Left{std::move(left_)});
    }
    cut_edges();
    return result;
  }

 private:
  struct Caught {
    Edge node;
    std::shared_ptr<variable_list> gradients;
  };

  Role role(int32_t node) const { return cut_.roles[static_cast<size_t>(node)]; }
  Node& node(int32_t node) const { return *cut_.nodes[static_cast<size_t>(node)]; }

  void prepare(Node& node, Role role) {
    if (role == Role::shared) {
      if (has_hooks_before(node)) {
        caught_.push_back({{node.getptr(), 0}, std::make_shared<variable_list>()});
        keep_gradients(node, caught_.back().gradients);
        return;
      }
      for (uint32_t k = 0; k < node.num_inputs(); ++k) {
        captured_.emplace_back(node.getptr(), k);
        begin_.emplace_back(node.getptr(), k);
      }
    } else if ((role == Role::inner || role == Role::once) && may_hold_tensors(node)) {
      release_after_run(node);
    }
  }

  /// Undefined gradients stay behind, and parameters that nothing else reaches: nothing would be added to them.
  void leave(Edge edge, const at::Tensor& gradient) {
    if (gradient.defined()) {
      left_.edges.push_back(std::move(edge));
      left_.gradients.push_back(gradient);
    }
  }

  void keep(const variable_list& gradients) {
    for (size_t i = 0; i < begin_.size(); ++i) {
      leave(std::move(begin_[i]), gradients[inputs_ + i]);
    }
    for (const auto& caught : caught_) {
      for (uint32_t k = 0; k < caught.gradients->size(); ++k) {
        leave({caught.node.function, k}, (*caught.gradients)[k]);
      }
    }
  }

  /// W must not come back to what has run. What was captured holds the nodes that are cut: none goes away here.
  void cut_edges() noexcept {
    for (const auto& caught : caught_) {
      drop_hooks_before(*caught.node.function);
    }
    for (const auto& link : cut_.links) {
      if (role(link.from) == Role::shared && role(link.to) != Role::weight) {
        node(link.from).next_edges()[static_cast<size_t>(link.edge)] = Edge();
      }
    }
  }

  const GraphCut& cut_;
  size_t inputs_;
  Roots roots_;
  edge_list captured_;  ///< the inputs, then where begin_ begins
  edge_list begin_;     ///< where W begins with what was captured
  std::vector<Caught> caught_;
  Roots left_;
};

std::vector<at::Tensor> backward_full(const std::vector<at::Tensor>& outputs,
                                      const std::vector<at::Tensor>& output_gradients,
                                      const std::vector<at::Tensor>& inputs) {
  check_inputs(inputs);
  return run_whole(find_roots(outputs, output_gradients), inputs);
}

InputBackward backward_input(const std::vector<at::Tensor>& outputs,
                             const std::vector<at::Tensor>& output_gradients,
                             const std::vector<at::Tensor>& inputs) {
  check_inputs(inputs);
  auto roots = find_roots(outputs, output_gradients);
  edge_list edges;
  for (const auto& input : inputs) {
    if (takes_part(input)) {
      edges.push_back(torch::autograd::impl::gradient_edge(input));
    }
  }
  const auto cut = cut_graph(roots.edges, edges);
  InputBackward result;
  if (!cut.obstacle.empty()) {
    result.input_gradients = run_whole(roots, inputs);
    result.split = false;
    result.note = "not split: " + cut.obstacle;
  } else {
    result = InputPass(std::move(roots), std::move(edges), cut).run();
    result.input_gradients = spread(std::move(result.input_gradients), inputs);
    if (!cut.once_names.empty()) {
      result.note = "split in part: gradients of parameters that come out of " + cut.once_names +
                    " are computed with those of the inputs";
    }
  }
  return result;
}

}  // namespace brimful::pipeline
