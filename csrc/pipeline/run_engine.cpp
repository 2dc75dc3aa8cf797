#include "pipeline/run_engine.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "pipeline/make_node.h"

namespace brimful::pipeline {
namespace {
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;

struct Last : Node {
  Last() : Node(/*sequence_nr=*/uint64_t{0}) {}
  variable_list apply(variable_list&& /*gradients*/) override { return {}; }
};

/// The engine takes what is left of a pass that failed out of the thread's queue before it comes to a node that is
/// older than all others.
void empty_queue() noexcept {
  if (torch::autograd::get_current_graph_task_id() != -1) {
    return;  // within another backward, whose tasks are in the same queue
  }
  try {
    const auto nothing = at::empty({0}, at::kFloat);
    const auto last = make_node<Last>();
    last->add_input_metadata(nothing);
    Engine::get_default_engine().execute({Edge(last, 0)}, {nothing}, false, false, true, {});
  } catch (const std::exception&) {  // the error that is on its way says more
  }
}
}  // namespace

variable_list run_engine(const edge_list& roots, const variable_list& gradients, Keep keep,
                         const edge_list& captured) {
  try {
    return Engine::get_default_engine().execute(roots, gradients, keep == Keep::graph,
                                                /*create_graph=*/false,
                                                /*accumulate_grad=*/captured.empty(), captured);
  } catch (...) {
    empty_queue();
    throw;
  }
}

}  // namespace brimful::pipeline
