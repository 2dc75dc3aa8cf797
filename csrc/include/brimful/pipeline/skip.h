#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>

#include <string>

namespace brimful::pipeline {

/// Within a stage's forward: leaves `tensor`, which may be undefined, for a later stage, which gets it by pop(name) in the
/// same microbatch, past the stages in between. Its gradient comes back the same way. What no stage has popped fails the
/// step behind the last stage's first forward. Outside a pipeline it is left for the same thread's pop(name), with its
/// graph: the model that is not cut runs as it is.
/// @throws c10::ValueError if `name` was stashed in this microbatch already
BRIMFUL_API void stash(const std::string& name, const at::Tensor& tensor);

/// What an earlier stage has stashed in this microbatch, cut off from its graph and on this stage's device. Each may be
/// popped once; a checkpoint that runs a forward again gets it again.
/// @throws c10::ValueError if there is none of that name (those that there are, are named), or if a later stage has changed
/// it in place
BRIMFUL_API at::Tensor pop(const std::string& name);

}  // namespace brimful::pipeline
