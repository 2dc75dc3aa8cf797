#pragma once
#include <ATen/ATen.h>

#include <functional>
#include <string>
#include <vector>

#include "pipeline/split_stage.h"

/// Those that the tests split.
namespace brimful::test {

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
