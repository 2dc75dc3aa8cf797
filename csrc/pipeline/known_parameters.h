#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace brimful::pipeline {

/// Whether the graph of `outputs` leads to no leaf but `known` ones: a step that is undone empties the gradients of those
/// parameters that the pipeline was told of. Walks the whole graph.
/// @throws c10::ValueError, which says how many others there are, and the shape of one
void require_known(const std::vector<at::Tensor>& outputs,
                   const std::vector<const std::vector<at::Tensor>*>& known, int stage);

}  // namespace brimful::pipeline
