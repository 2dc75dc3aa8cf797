#pragma once
// Takes torch::nn's headers in; not in brimful.h.
#include <ATen/core/Tensor.h>
#include <brimful/ladder/activation_checkpoint.h>
#include <torch/nn/modules/container/sequential.h>

#include <cstdint>

namespace brimful {

/// `model->forward(input)` in `segments` of about as many layers each, all but the last one by checkpoint(): what lies between
/// two segments is held, and of what lies within one at a time. Each layer maps one tensor to one. The model is as it was:
/// parameters keep their names. Otherwise as checkpoint().
/// @throws c10::ValueError unless `segments` is from 1 to the number of layers
BRIMFUL_API at::Tensor checkpoint_sequential(const torch::nn::Sequential& model, int64_t segments,
                                             at::Tensor input,
                                             const CheckpointOptions& options = {});

}  // namespace brimful
