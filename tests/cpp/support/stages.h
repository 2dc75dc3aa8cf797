#pragma once
// Small stages and what a model that is not cut makes of the same batch.
#include "support/net.h"

#include <brimful/pipeline/pipeline.h>
#include <algorithm>

namespace brimful::test {

/// A linear layer and tanh, in float64.
struct Layer {
  explicit Layer(double salt, int64_t in = 4, int64_t out = 4)
      : weight(filled({out, in}, salt, at::kDouble).set_requires_grad(true)),
        bias(filled({out}, salt + 1, at::kDouble).set_requires_grad(true)) {}
  at::Tensor operator()(const at::Tensor& x) const { return at::tanh(at::linear(x, weight, bias)); }
  std::vector<at::Tensor> parameters() const { return {weight, bias}; }

  at::Tensor weight;
  at::Tensor bias;
};

struct Layers {
  explicit Layers(int count) {
    for (int i = 0; i < count; ++i) {
      layers.emplace_back(i + 1.0);
    }
  }
  std::vector<pipeline::Stage> stages() const {
    std::vector<pipeline::Stage> result;
    for (const auto& layer : layers) {
      result.push_back(pipeline::make_stage(layer, layer.parameters()));
    }
    return result;
  }
  at::Tensor operator()(at::Tensor x) const {
    for (const auto& layer : layers) {
      x = layer(x);
    }
    return x;
  }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (const auto& layer : layers) {
      all.push_back(layer.weight);
      all.push_back(layer.bias);
    }
    return all;
  }
  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> all;
    for (const auto& parameter : parameters()) {
      all.push_back(parameter.grad());
    }
    return all;
  }
  void zero_grad() const {
    for (const auto& parameter : parameters()) {
      parameter.mutable_grad().reset();
    }
  }
  std::vector<Layer> layers;
};

inline at::Tensor mse(const at::Tensor& output, const at::Tensor& target) {
  return at::mse_loss(output, target);
}

inline bool all_close(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return a.size() == b.size() &&
         std::equal(a.begin(), a.end(), b.begin(), [](const auto& x, const auto& y) {
           return x.defined() == y.defined() && (!x.defined() || at::allclose(x, y, 1e-12, 1e-14));
         });
}

/// Whether the gradients of these layers of a `Layers`, weights and biases in turn, are `factor` times the expected ones.
inline bool all_close_in(const std::vector<int>& layers, const std::vector<at::Tensor>& gradients,
                         const std::vector<at::Tensor>& expected, double factor) {
  return std::all_of(layers.begin(), layers.end(), [&](int layer) {
    const auto good = [&](size_t k) {
      return gradients[k].defined() &&
             at::allclose(gradients[k], expected[k] * factor, 1e-12, 1e-14);
    };
    return good(2 * layer) && good(2 * layer + 1);
  });
}

/// The numbers of the stages that ran their forward again.
inline std::vector<int> recomputed_stages(const Outcome& outcome) {
  std::vector<int> numbers;
  for (size_t i = 0; i < outcome.stages.size(); ++i) {
    if (outcome.stages[i].recomputed) {
      numbers.push_back(static_cast<int>(i));
    }
  }
  return numbers;
}

}  // namespace brimful::test
