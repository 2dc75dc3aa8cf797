#pragma once
// Takes torch::nn's headers in; programs whose stages are no torch::nn::Sequential can do without.
#include <brimful/export.h>
#include <brimful/pipeline/stage.h>
#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <vector>

namespace brimful::pipeline {

/// Stages with as many of the model's layers each as `balance` says, in order; layers keep their names, and are shared with
/// the model. stage_of() takes each.
/// @throws c10::ValueError unless `balance` has positive numbers that add up to the number of layers
BRIMFUL_API std::vector<torch::nn::Sequential> split_sequential(
    const torch::nn::Sequential& model, const std::vector<int64_t>& balance);

}  // namespace brimful::pipeline
