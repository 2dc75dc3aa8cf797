#pragma once
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>

namespace brimful::pipeline {

enum class Keep : uint8_t { graph, nothing };

/// One pass of autograd's engine: captures the gradients that arrive at `captured`, or, where that is empty,
/// accumulates into the leaves (to a reducer that alone is a step's backward). If it throws, gradients that were under
/// way are freed: the engine by itself keeps them until the thread's next backward.
torch::autograd::variable_list run_engine(const torch::autograd::edge_list& roots,
                                          const torch::autograd::variable_list& gradients,
                                          Keep keep, const torch::autograd::edge_list& captured);

}  // namespace brimful::pipeline
