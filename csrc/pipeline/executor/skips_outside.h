#pragma once
#include <ATen/core/Tensor.h>

#include <string>

namespace brimful::pipeline {

// stash() and pop() of a model that runs by itself, outside a pipeline: a thread's own, by name. `again`: a backward runs a
// part of the forward once more.

void stash_outside(const std::string& name, const at::Tensor& tensor, bool again);
/// @throws c10::ValueError if there is none of that name
at::Tensor pop_outside(const std::string& name, bool again);

}  // namespace brimful::pipeline
