#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/ladder/activation_checkpoint.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "ladder/function_watch.h"
#include "ladder/inner_graph.h"
#include "ladder/refuse_second_run.h"
#include "ladder/surroundings.h"
#include "step/make_node.h"

namespace brimful::ladder {
namespace {
using detail::CheckpointCall;
using torch::autograd::CreationMeta;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;
namespace impl = torch::autograd::impl;

/// An output that backward reaches.
struct GraphOutput {
  size_t position = 0;  ///< in what the function returns
  std::vector<int64_t> sizes;
  c10::ScalarType dtype;
};

/// What a second run needs, and what it is compared with.
struct FirstRun {
  CheckpointCall call;
  std::vector<ReadTensor> reads;
  Changes changes;
  GeneratorStates generators;
  AutocastState autocast;
  std::vector<GraphOutput> outputs;
  size_t output_count = 0;
  edge_list
      targets;  ///< where gradients go: the node's own edges may have been led elsewhere since

  std::string name_of(const at::Tensor& tensor) const;
  void require_unchanged() const;
  std::vector<at::Tensor> run_again() const;
  void require_same_outputs(const std::vector<at::Tensor>& outputs) const;
  void require_same_targets(const std::vector<BorderEdge>& edges) const;
};

std::string FirstRun::name_of(const at::Tensor& tensor) const {
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    if (call.inputs[i].is_same(tensor)) {
      return "input " + std::to_string(i);
    }
  }
  for (const auto& [name, known] : call.named()) {
    if (known.is_same(tensor)) {
      return name;
    }
  }
  return "one that the function captures";
}

void FirstRun::require_unchanged() const {
  for (const auto& read : reads) {
    const auto tensor = read.get();
    if (tensor.defined() && static_cast<uint32_t>(tensor._version()) != read.version) {
      refuse_second_run(
          "a tensor that a checkpointed function reads was changed in place before its backward, "
          "which reads it again (tensor: ",
          name_of(tensor), ", shape: ", tensor.sizes(),
          "); run backward before the optimizer's step, or give the function a clone");
    }
  }
}

std::vector<at::Tensor> FirstRun::run_again() const {
  const Surroundings surroundings(generators, autocast);
  const at::AutoGradMode with_grad(true);
  return call.again();
}

void FirstRun::require_same_outputs(const std::vector<at::Tensor>& found) const {
  if (found.size() != output_count) {
    refuse_second_run(
        "a checkpointed function returned another number of tensors when it ran again (first: ",
        output_count, ", now: ", found.size(), "); it must compute the same each time");
  }
  for (const auto& [position, sizes, dtype] : outputs) {
    const auto& output = found[position];
    const bool is_same = output.defined() && output.requires_grad() && !output.is_leaf() &&
                         output.sizes() == at::IntArrayRef(sizes) && output.scalar_type() == dtype;
    if (!is_same) {
      refuse_second_run(
          "a checkpointed function returned another tensor when it ran again (output: ", position,
          ", first: ", dtype, " ", at::IntArrayRef(sizes), ", now: ",
          output.defined() ? c10::str(output.scalar_type(), " ", output.sizes(),
                                      output.requires_grad() ? "" : " without gradient")
                           : std::string("none"),
          "); it must compute the same each time");
    }
  }
}

void FirstRun::require_same_targets(const std::vector<BorderEdge>& edges) const {
  const bool same = std::equal(
      edges.begin(), edges.end(), targets.begin(), targets.end(),
      [](const BorderEdge& edge, const Edge& target) { return same_target(edge.to, target); });
  if (!same) {
    refuse_second_run(
        "a checkpointed function read other tensors when it ran again (with gradients, first: ",
        targets.size(), ", now: ", edges.size(),
        "); it must compute the same each time, from inputs and parameters that are made outside "
        "of it");
  }
}

/// Gradients go through it in the graph of the outer backward, so that hooks and reducers see them there, once.
struct Checkpoint : Node {
  Checkpoint(edge_list edges, std::shared_ptr<const FirstRun> first_run)
      : Node(std::move(edges)), first_run_(std::move(first_run)) {}

  variable_list apply(variable_list&& gradients) override;
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    first_run_.reset();
  }

 private:
  std::shared_ptr<const FirstRun> first_run() {
    const std::lock_guard lock(mutex_);
    return first_run_;
  }

  std::shared_ptr<const FirstRun> first_run_;
};

variable_list Checkpoint::apply(variable_list&& gradients) {
  const auto first = first_run();
  TORCH_CHECK(first != nullptr,
              "backward runs a second time through a checkpoint whose graph was freed; pass "
              "retain_graph = true to the first backward");
  std::vector<bool> needed(num_outputs());
  for (size_t i = 0; i < needed.size(); ++i) {
    needed[i] = task_should_compute_output(i);
  }
  const bool none = std::none_of(gradients.begin(), gradients.end(),
                                 [](const at::Tensor& gradient) { return gradient.defined(); });
  if (none || std::find(needed.begin(), needed.end(), true) == needed.end()) {
    return variable_list(needed.size());
  }
  const bool create_graph = at::GradMode::is_enabled();
  first->require_unchanged();
  const BytesFromBefore bytes(
      first->changes);  // to the end: what the second run saves may share them
  const InnerNodes inner(first->call.inputs);
  std::vector<NodePointer> nodes;
  edge_list roots;
  variable_list root_gradients;
  {
    const auto outputs = first->run_again();
    first->require_same_outputs(outputs);
    for (size_t i = 0; i < first->outputs.size(); ++i) {
      const auto edge = impl::gradient_edge(outputs[first->outputs[i].position]);
      nodes.push_back(edge.function);
      if (gradients[i].defined()) {
        roots.push_back(edge);
        root_gradients.push_back(std::move(gradients[i]));
      }
    }
  }
  const auto edges = border_edges(nodes, inner);
  first->require_same_targets(edges);
  return gradients_over_border(roots, root_gradients, edges, needed, create_graph);
}

/// The first run: watched, and put back where it fails.
class Begin {
 public:
  Begin(CheckpointCall call, const CheckpointOptions& options)
      : options_(options), first_(std::make_shared<FirstRun>()) {
    first_->call = std::move(call);
    first_->autocast = AutocastState::now();
    for (const auto& input : first_->call.inputs) {
      edges_.push_back(edge_of(input));
    }
  }

  std::vector<at::Tensor> run() {
    const InnerNodes inner(first_->call.inputs);
    Skeletons skeletons(inner);
    try {
      return run_watched(inner, &skeletons);
    } catch (...) {
      if (!skeletons.was_run()) {
        throw;
      }
    }
    // The function runs a backward of its own, which needs what its operators save.
    return run_watched(InnerNodes(first_->call.inputs), nullptr);
  }

 private:
  static Edge edge_of(const at::Tensor& tensor) {
    return tensor.defined() && tensor.requires_grad() ? impl::gradient_edge(tensor) : Edge();
  }

  std::vector<at::Tensor> run_watched(const InnerNodes& inner, Skeletons* skeletons) {
    FunctionWatch watch(skeletons, options_.preserve_rng);
    try {
      auto outputs = first_->call.first();
      require_unchanged_graph(watch);
      first_->call.first = nullptr;  // refers to its caller's variables
      first_->changes = watch.changes();
      first_->generators = watch.drawn_from();
      first_->reads = watch.reads();
      attach(outputs, inner, watch);
      return outputs;
    } catch (...) {
      put_back(watch);
      throw;
    }
  }

  void require_unchanged_graph(const FunctionWatch& watch) const {
    bool changed = watch.changed_in_graph();
    for (size_t i = 0; i < edges_.size(); ++i) {
      changed = changed || edge_of(first_->call.inputs[i]) != edges_[i];
    }
    if (changed) {
      refuse_second_run(
          "a checkpointed function changes in place a tensor from outside that has gradients, and "
          "backward could not run it again; let it change a clone (as in relu(x) in the place of "
          "relu_(x))");
    }
  }

  void put_back(const FunctionWatch& watch) const noexcept {
    watch.undo();
    for (size_t i = 0; i < edges_.size(); ++i) {
      const auto& input = first_->call.inputs[i];
      if (input.defined() && edges_[i].is_valid() && !input.is_leaf() &&
          impl::grad_fn_unsafe(input) != edges_[i].function.get()) {
        impl::set_gradient_edge(input, edges_[i]);
      }
    }
  }

  void attach(std::vector<at::Tensor>& outputs, const InnerNodes& inner,
              const FunctionWatch& watch) {
    std::vector<NodePointer> nodes;
    std::unordered_map<const c10::TensorImpl*, size_t> places;  ///< of each tensor once
    std::unordered_map<const void*, int> sharers;               ///< of each storage
    for (size_t i = 0; i < outputs.size(); ++i) {
      const auto& output = outputs[i];
      if (output.defined() && output.has_storage()) {
        ++sharers[output.storage().unsafeGetStorageImpl()];
      }
      const auto edge = edge_of(output);
      if (edge.is_valid() && !inner.is_border(*edge.function) &&
          places.try_emplace(output.unsafeGetTensorImpl(), i).second) {
        nodes.push_back(edge.function);
        first_->outputs.push_back({i, output.sizes().vec(), output.scalar_type()});
      }
    }
    if (nodes.empty()) {
      return;
    }
    first_->output_count = outputs.size();
    for (const auto& edge : border_edges(nodes, inner)) {
      first_->targets.push_back(edge.to);
    }
    const auto node = make_node<Checkpoint>(first_->targets, first_);
    std::vector<at::Tensor> attached;
    for (const auto& output : first_->outputs) {
      const auto& tensor = outputs[output.position];
      const bool alone =
          watch.is_born(tensor) && sharers[tensor.storage().unsafeGetStorageImpl()] == 1;
      attached.push_back(output_of(tensor, alone));
      impl::set_gradient_edge(attached.back(), {node, node->add_input_metadata(attached.back())});
    }
    replace(outputs, attached);
  }

  /// What is changed in place later must find its way through the graph: a view of what else there is may not be.
  static at::Tensor output_of(const at::Tensor& tensor, bool alone) {
    if (!tensor.is_view()) {
      return tensor;
    }
    if (alone) {
      return tensor.detach();
    }
    auto* view = impl::get_view_autograd_meta(tensor);
    if (view != nullptr && view->has_bw_view()) {
      view->set_creation_meta(CreationMeta::IN_CUSTOM_FUNCTION);
    }
    return tensor;
  }

  void replace(std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& attached) const {
    const auto found = outputs;
    for (size_t i = 0; i < attached.size(); ++i) {
      const auto& old = found[first_->outputs[i].position];
      for (size_t k = 0; k < outputs.size(); ++k) {
        if (found[k].is_same(old)) {
          outputs[k] = attached[i];
        }
      }
    }
  }

  CheckpointOptions options_;
  std::shared_ptr<FirstRun> first_;
  edge_list edges_;  ///< of the inputs
};
}  // namespace
}  // namespace brimful::ladder

namespace brimful::detail {
std::vector<at::Tensor> run_checkpoint(CheckpointCall call, const CheckpointOptions& options) {
  if (!at::GradMode::is_enabled() || c10::InferenceMode::is_enabled()) {
    return call.first();
  }
  return ladder::Begin(std::move(call), options).run();
}
}  // namespace brimful::detail
