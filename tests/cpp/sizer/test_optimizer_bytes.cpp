#include <brimful/memory/stats.h>
#include <brimful/sizer/optimizer_bytes.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include "support/catch.h"

#include <functional>
#include <memory>
#include <vector>

namespace test_optimizer_bytes {

namespace optim = torch::optim;
using brimful::next_step_bytes;
namespace memory = brimful::memory;

namespace {
constexpr int64_t kLargest = 4 * 300 * 200;  // bytes of the largest parameter

using Make = std::function<std::unique_ptr<optim::Optimizer>(std::vector<at::Tensor>)>;

template <typename Optimizer, typename Options>
Make make(Options options) {
  return [options](std::vector<at::Tensor> parameters) {
    return std::make_unique<Optimizer>(std::move(parameters), options);
  };
}

std::vector<at::Tensor> parameters() {
  std::vector<at::Tensor> made;
  for (const auto rows : {100, 300, 50}) {
    made.push_back(at::randn({rows, 200}).requires_grad_());
  }
  made.push_back(at::randn({1000, 1000}));  // frozen
  return made;
}

void fill_gradients(const std::vector<at::Tensor>& parameters) {
  for (const auto& parameter : parameters) {
    if (parameter.requires_grad()) {
      parameter.mutable_grad() = at::ones_like(parameter);
    }
  }
}
}  // namespace

TEST_CASE(
    "The next step's bytes are forecast for LibTorch's optimizers, before and after state is made",
    "[sizer]") {
  const c10::Device cpu(c10::kCPU);
  memory::install();
  const std::vector<Make> makers{
      make<optim::Adam>(optim::AdamOptions(0.1)),
      make<optim::Adam>(optim::AdamOptions(0.1).amsgrad(true).weight_decay(0.1)),
      make<optim::AdamW>(optim::AdamWOptions(0.1)),
      make<optim::AdamW>(optim::AdamWOptions(0.1).amsgrad(true)),
      make<optim::SGD>(optim::SGDOptions(0.1)),
      make<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9)),
      make<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.1)),
      make<optim::RMSprop>(optim::RMSpropOptions(0.1)),
      make<optim::RMSprop>(
          optim::RMSpropOptions(0.1).momentum(0.9).centered(true).weight_decay(0.1)),
      make<optim::Adagrad>(optim::AdagradOptions(0.1).weight_decay(0.1)),
  };
  for (size_t i = 0; i < makers.size(); ++i) {
    const auto trained = parameters();
    const auto optimizer = makers[i](trained);
    for (const bool first : {true, false}) {
      const auto before = memory::stats(cpu).used_bytes;
      const auto told = next_step_bytes(*optimizer);
      const memory::PeakScope peak(cpu);
      fill_gradients(trained);
      optimizer->step();
      const auto real = peak.peak_bytes() - before;
      INFO("optimizer " << i << ", first step: " << first);
      CHECK(told + 1024 >= real);  // 1024: numbers that kernels wrap in tensors
      CHECK(told <= real + 2 * kLargest);
      optimizer->zero_grad();
    }
  }
}

TEST_CASE("An optimizer whose step is not known is judged by its first step", "[sizer]") {
  optim::LBFGS optimizer(parameters());
  CHECK(next_step_bytes(optimizer) == 0);
}

}  // namespace test_optimizer_bytes
