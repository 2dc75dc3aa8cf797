#pragma once
#include <ATen/ATen.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "support/tensors.h"

/// A stage to split the backward of, of plain operations.
namespace brimful::test {

using Tensors = std::vector<at::Tensor>;

inline at::Tensor leaf(at::Tensor value) {
  return value.detach().requires_grad_();
}

struct SplitStage {
  std::string name;
  Tensors parameters;
  Tensors inputs;
  std::function<Tensors(const Tensors&)> forward;

  /// Leaves with the values of the inputs.
  Tensors cut() const {
    Tensors leaves;
    for (const auto& input : inputs) {
      leaves.push_back(input.is_floating_point() || input.is_complex() ? leaf(input) : input);
    }
    return leaves;
  }
  void empty_gradients() const {
    for (const auto& parameter : parameters) {
      parameter.mutable_grad() = at::Tensor();
    }
  }
  Tensors gradients() const {
    Tensors result;
    for (const auto& parameter : parameters) {
      result.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    }
    return result;
  }
};

/// A gradient for each output that needs one.
inline Tensors gradients_for(const Tensors& outputs) {
  Tensors result;
  for (size_t i = 0; i < outputs.size(); ++i) {
    result.push_back(
        outputs[i].requires_grad()
            ? filled(outputs[i].sizes(), static_cast<double>(i) + 0.3).to(outputs[i].scalar_type())
            : at::Tensor());
  }
  return result;
}

inline SplitStage mlp_stage(int64_t rows = 5, int64_t width = 8, int layers = 3) {
  SplitStage stage{"mlp", {}, {filled({rows, width}, 1)}, {}};
  for (int i = 0; i < layers; ++i) {
    stage.parameters.push_back(leaf(filled({width, width}, 2 + i)));
    stage.parameters.push_back(leaf(filled({width}, 3 + i)));
  }
  stage.forward = [p = stage.parameters](const Tensors& x) -> Tensors {
    auto y = x[0];
    for (size_t i = 0; i < p.size(); i += 2) {
      y = at::gelu(at::linear(y, p[i], p[i + 1]));
    }
    return {y};
  };
  return stage;
}

/// A transformer's block of width `d`, `layers` times.
inline SplitStage transformer_stage(int64_t b = 2, int64_t t = 6, int64_t d = 16, int64_t heads = 4,
                                    int layers = 2) {
  SplitStage stage{"transformer", {}, {filled({b, t, d}, 1)}, {}};
  for (int i = 0; i < layers; ++i) {
    for (const auto& shape : std::vector<std::vector<int64_t>>{{3 * d, d},
                                                               {3 * d},
                                                               {d, d},
                                                               {d},
                                                               {4 * d, d},
                                                               {4 * d},
                                                               {d, 4 * d},
                                                               {d},
                                                               {d},
                                                               {d},
                                                               {d},
                                                               {d}}) {
      stage.parameters.push_back(leaf(filled(shape, 2.0 + i) / std::sqrt(static_cast<double>(d))));
    }
  }
  stage.forward = [p = stage.parameters, b, t, d, heads](const Tensors& inputs) -> Tensors {
    auto x = inputs[0];
    for (auto w = p.begin(); w != p.end(); w += 12) {
      const auto qkv = at::linear(at::layer_norm(x, {d}, w[8], w[9]), w[0], w[1])
                           .view({b, t, 3, heads, d / heads})
                           .permute({2, 0, 3, 1, 4});
      const auto scores = at::matmul(qkv[0], qkv[1].transpose(-1, -2))
                              .div(std::sqrt(static_cast<double>(d / heads)))
                              .softmax(-1);
      const auto mixed = at::matmul(scores, qkv[2]).transpose(1, 2).reshape({b, t, d});
      x = x + at::linear(mixed, w[2], w[3]);
      const auto up = at::linear(at::layer_norm(x, {d}, w[10], w[11]), w[4], w[5]);
      x = x + at::linear(at::gelu(up), w[6], w[7]);
    }
    return {x};
  };
  return stage;
}

}  // namespace brimful::test
