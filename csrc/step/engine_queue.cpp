#include "step/engine_queue.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
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

// Beside the dispatcher: a Python mode could fail it.
at::Tensor nothing_on(c10::Device device) {
  if (!device.is_cuda()) {
    return at::detail::empty_cpu({0}, at::kFloat);
  }
  c10::Storage none(c10::Storage::use_byte_size_t{}, 0, c10::DataPtr(nullptr, device), nullptr,
                    /*resizable=*/false);
  return at::detail::make_tensor<c10::TensorImpl>(std::move(none),
                                                  c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                  caffe2::TypeMeta::Make<float>());
}

// The engine takes what is left of a pass that failed out of a thread's queue before it comes to a node that is older
// than all others. A device's thread has its queue, and hands an error on before it lets go of the node that failed.
void pass_through(c10::Device device) {
  const auto nothing = nothing_on(device);
  const auto last = make_node<Last>();
  last->add_input_metadata(nothing);
  Engine::get_default_engine().execute({Edge(last, 0)}, {nothing}, false, false, true, {});
}
}  // namespace

void empty_engine_queue(c10::Device device) noexcept {
  if (torch::autograd::get_current_graph_task_id() != -1) {
    return;  // within another backward, whose tasks are in the same queue
  }
  try {
    const memory::Unlimited unlimited;
    if (device.is_cuda()) {  // first: its thread writes into this one's queue that it has ended
      pass_through(device);
    }
    pass_through(c10::Device(c10::DeviceType::CPU));
  } catch (const std::exception&) {  // the error that is on its way says more
  }
}

}  // namespace brimful
