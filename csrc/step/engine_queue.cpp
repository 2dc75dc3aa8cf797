#include "step/engine_queue.h"

#include <ATen/EmptyTensor.h>
#include <brimful/memory/stats.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "step/make_node.h"

namespace brimful {
namespace {
using torch::autograd::Edge;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;

struct Last : Node {
  Last() : Node(/*sequence_nr=*/uint64_t{0}) {}
  variable_list apply(variable_list&& /*gradients*/) override { return {}; }
};
}  // namespace

// The engine takes what is left of a pass that failed out of the thread's queue before it comes to a node that is older
// than all others.
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
    Engine::get_default_engine().execute({Edge(last, 0)}, {nothing}, false, false, true, {});
  } catch (const std::exception&) {  // the error that is on its way says more
  }
}

}  // namespace brimful
