#include "pipeline/backward/run_engine.h"

#include <torch/csrc/autograd/engine.h>

#include "step/engine_queue.h"

namespace brimful::pipeline {
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::variable_list;

variable_list run_engine(const edge_list& roots, const variable_list& gradients, Keep keep,
                         const edge_list& captured) {
  c10::Device device(c10::DeviceType::CPU);
  for (const auto& gradient : gradients) {
    device = gradient.defined() ? gradient.device() : device;
  }
  return run_backward_cleanly(device, [&] {
    return Engine::get_default_engine().execute(roots, gradients, keep == Keep::graph,
                                                /*create_graph=*/false,
                                                /*accumulate_grad=*/captured.empty(), captured);
  });
}

}  // namespace brimful::pipeline
