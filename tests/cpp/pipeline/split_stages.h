#pragma once
#include <ATen/ATen.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "support/net.h"

/// Stages to split the backward of, of plain operations.
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

inline std::vector<SplitStage> split_stages() {
  std::vector<SplitStage> stages{mlp_stage(), transformer_stage()};
  const auto add = [&](std::string name, Tensors parameters, Tensors inputs,
                       std::function<Tensors(const Tensors&, const Tensors&)> forward) {
    stages.push_back({std::move(name), parameters, std::move(inputs),
                      [parameters, forward = std::move(forward)](const Tensors& x) {
                        return forward(parameters, x);
                      }});
  };
  const auto w = [](std::vector<int64_t> shape, double salt) { return leaf(filled(shape, salt)); };
  add("convolution", {w({4, 3, 3, 3}, 1), w({4}, 2), w({4}, 3)}, {filled({2, 3, 6, 6}, 4)},
      [](const Tensors& p, const Tensors& x) -> Tensors {
        const auto y = at::conv2d(x[0], p[0], p[1], 1, 1);
        return {at::relu(at::batch_norm(y, p[2], p[1], {}, {}, true, 0.1, 1e-5, false))};
      });
  add("shared weight", {w({4, 4}, 1)}, {filled({3, 4}, 2)},
      [](const Tensors& p, const Tensors& x) -> Tensors {
        return {x[0].matmul(p[0]).matmul(p[0]).tanh().matmul(p[0])};
      });
  add("several outputs", {w({4, 4}, 1), w({4}, 2)}, {filled({3, 4}, 3), filled({3, 4}, 4)},
      [](const Tensors& p, const Tensors& x) -> Tensors {
        const auto y = x[0].matmul(p[0]);
        return {y + p[1], p[1].sin(), x[1], y.argmax(1), x[1] * y};
      });
  add("embedding", {w({6, 4}, 1), w({4, 4}, 2)}, {filled({3, 4}, 3), at::tensor({1, 5, 1})},
      [](const Tensors& p, const Tensors& x) -> Tensors {
        return {(x[0] + at::embedding(p[0], x[1])).matmul(p[1])};
      });
  add("in place on views", {w({4, 4}, 1), w({4}, 2)}, {filled({3, 4}, 3)},
      [](const Tensors& p, const Tensors& x) -> Tensors {
        auto y = x[0].matmul(p[0]);
        y.select(1, 0).mul_(2);
        y.select(1, 1).copy_(p[1].narrow(0, 0, 3));
        y.select(0, 2).mul_(p[1]);
        return {y.matmul(p[0]) * p[1]};
      });
  add("no input needs a gradient", {w({6, 4}, 1), w({4}, 2)}, {at::tensor({1, 5, 1})},
      [](const Tensors& p, const Tensors& x) -> Tensors {
        return {at::embedding(p[0], x[0]) * p[1]};
      });
  add("frozen", {}, {filled({3, 4}, 3)},
      [](const Tensors&, const Tensors& x) -> Tensors { return {x[0].sin() * x[0]}; });
  return stages;
}

}  // namespace brimful::test
