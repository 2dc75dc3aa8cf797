#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>

#include <string>

namespace brimful::pipeline {

/// Within a stage's forward: leaves `tensor` for a later stage, which gets it by pop(name) in the same microbatch, past
/// the stages in between. Its gradient comes back the same way.
/// @throws c10::ValueError outside a stage, or if `name` was stashed in this microbatch already
BRIMFUL_API void stash(const std::string& name, const at::Tensor& tensor);

/// What an earlier stage has stashed in this microbatch, cut off from its graph and on this stage's device. Each may be
/// popped once.
/// @throws c10::ValueError outside a stage, or if there is none of that name (those that there are, are named)
BRIMFUL_API at::Tensor pop(const std::string& name);

}  // namespace brimful::pipeline
