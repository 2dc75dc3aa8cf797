#include "step/engine_queue.h"

#include <ATen/EmptyTensor.h>
#include <brimful/memory/stats.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "memory/cuda.h"
#include "step/make_node.h"

namespace brimful {
namespace {
using torch::autograd::Edge;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;

struct Last : Node {
  Last() : Node(/*sequence_nr=*/uint64_t{0}) {}
  variable_list apply(variable_list&& /*gradients*/) override {
    return variable_list(num_outputs());
  }
};

/// A node for the engine's thread of the current CUDA device; none where CUDA is not in use.
decltype(Edge::function) last_of_device() {
  if (!memory::cuda_refusals()) {
    return nullptr;
  }
  const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
  const auto nothing =
      at::detail::make_tensor<c10::TensorImpl>(c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                               caffe2::TypeMeta::Make<float>(), cuda.getDevice());
  auto last = make_node<Last>();
  last->add_input_metadata(nothing);
  return last;
}
}  // namespace

// The engine takes what is left of a pass that failed out of a thread's queue before it comes to a node that is older
// than all others. A device's thread has its queue, and hands an error on before it lets go of the node that failed.
void empty_engine_queue() noexcept {
  if (torch::autograd::get_current_graph_task_id() != -1) {
    return;  // within another backward, whose tasks are in the same queue
  }
  try {
    const memory::Unlimited unlimited;
    // Beside the dispatcher: a Python mode could fail it.
    const at::Tensor nothing = at::detail::empty_cpu({0}, at::kFloat);
    const auto last = make_node<Last>();
    last->add_input_metadata(nothing);
    if (auto of_device = last_of_device()) {
      last->add_next_edge(Edge(std::move(of_device), 0));
    }
    Engine::get_default_engine().execute({Edge(last, 0)}, {nothing}, false, false, true, {});
  } catch (const std::exception&) {  // the error that is on its way says more
  }
}

}  // namespace brimful
