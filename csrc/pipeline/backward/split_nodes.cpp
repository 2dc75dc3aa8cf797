#include "pipeline/backward/split_nodes.h"

#include <torch/csrc/autograd/functions/tensor.h>

#include <memory>
#include <utility>

#include "step/make_node.h"

namespace brimful::pipeline {
namespace {
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;

[[noreturn]] void refuse_compiled_autograd() {
  C10_THROW_ERROR(NotImplementedError,
                  "compiled autograd cannot run a backward that is split "
                  "(torch._dynamo.config.compiled_autograd: True); switch it off for pipelines");
}

struct ReleaseAfterRun : torch::autograd::FunctionPostHook {
  explicit ReleaseAfterRun(Node& node) : node_(node) {}
  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    node_.release_variables();
    return outputs;
  }
  void compiled_args(CompiledNodeArgs& /*args*/) const override { refuse_compiled_autograd(); }

 private:
  Node& node_;  // owns this
};

struct KeepGradients : torch::autograd::FunctionPreHook {
  explicit KeepGradients(std::shared_ptr<variable_list> kept) : kept_(std::move(kept)) {}
  variable_list operator()(const variable_list& gradients) override {
    *kept_ = gradients;
    return gradients;
  }
  void compiled_args(CompiledNodeArgs& /*args*/) const override { refuse_compiled_autograd(); }

 private:
  std::shared_ptr<variable_list> kept_;
};

struct Relay : Node {
  explicit Relay(const Edge& target) : Node(edge_list{target}) {
    input_metadata_.emplace_back(target.function->input_metadata(target.input_nr));
  }
  variable_list apply(variable_list&& gradients) override { return std::move(gradients); }
};
}  // namespace

void release_after_run(Node& node) {
  node.add_post_hook(std::make_unique<ReleaseAfterRun>(node));
}

void keep_gradients(Node& node, std::shared_ptr<variable_list> kept) {
  node.add_pre_hook(std::make_unique<KeepGradients>(std::move(kept)));
}

void drop_hooks_before(Node& node) noexcept {
  node.tensor_pre_hooks().clear();
  node.retains_grad_hooks().clear();
  node.pre_hooks().clear();
}

Edge put_relay(Node& node, uint32_t edge, Edge& target) {
  target = node.next_edges()[edge];
  Edge relay(make_node<Relay>(target), 0);
  node.next_edges()[edge] = relay;
  // An operation in place on a view runs another node within, which computes what that node's own edges ask for.
  if (auto* slices = dynamic_cast<torch::autograd::CopySlices*>(&node)) {
    if (edge > 0 && edge < slices->fn->num_outputs()) {
      slices->fn->next_edges()[edge] = relay;
    }
  }
  return relay;
}

}  // namespace brimful::pipeline
