// Steps for callgrind to count: `sizer_instructions cnn|encoder hand|sizer WARM_UP STEPS`. One process, no wrapper.
// Only what runs inside of brimful_bench_step is to be counted (--toggle-collect).
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <brimful/memory/stats.h>
#include <brimful/sizer/batch_sizer.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

extern "C" __attribute__((noinline)) void brimful_bench_step(const std::function<void()>& step) {
  step();
}

namespace {
using Batch = std::pair<at::Tensor, at::Tensor>;
constexpr double kLearningRate = 0.1;

class Net {
 public:
  virtual ~Net() = default;
  virtual at::Tensor loss(const at::Tensor& data, const at::Tensor& target) const = 0;
  virtual Batch batch() const = 0;
  const std::vector<at::Tensor>& parameters() const { return parameters_; }

 protected:
  at::Tensor add(at::IntArrayRef sizes, int64_t fan_in) {
    parameters_.push_back((at::randn(sizes) / std::sqrt(double(fan_in))).requires_grad_());
    return parameters_.back();
  }
  at::Tensor add_ones(int64_t size) {
    parameters_.push_back(at::ones({size}).requires_grad_());
    return parameters_.back();
  }

 private:
  std::vector<at::Tensor> parameters_;
};

/// That of examples/train_fashion_mnist.py.
class Cnn : public Net {
 public:
  at::Tensor loss(const at::Tensor& data, const at::Tensor& target) const override {
    auto x = at::max_pool2d(at::relu(at::conv2d(data, w1_, b1_, 1, 1)), 2);
    x = at::max_pool2d(at::relu(at::conv2d(x, w2_, b2_, 1, 1)), 2);
    x = at::relu(at::linear(x.flatten(1), w3_, b3_));
    return at::cross_entropy_loss(at::linear(x, w4_, b4_), target);
  }
  Batch batch() const override {
    return {at::randn({64, 1, 28, 28}), at::randint(10, {64}, at::kLong)};
  }

 private:
  at::Tensor w1_ = add({16, 1, 3, 3}, 9), b1_ = add({16}, 9);
  at::Tensor w2_ = add({32, 16, 3, 3}, 144), b2_ = add({32}, 144);
  at::Tensor w3_ = add({128, 1568}, 1568), b3_ = add({128}, 1568);
  at::Tensor w4_ = add({10, 128}, 128), b4_ = add({10}, 128);
};

class Encoder : public Net {
 public:
  static constexpr int64_t kWidth = 128, kHeads = 4, kLength = 32, kLayers = 4, kWords = 200;

  Encoder() {
    for (auto& layer : layers_) {
      layer = {add({3 * kWidth, kWidth}, kWidth),
               add({3 * kWidth}, kWidth),
               add({kWidth, kWidth}, kWidth),
               add({kWidth}, kWidth),
               add({4 * kWidth, kWidth}, kWidth),
               add({4 * kWidth}, kWidth),
               add({kWidth, 4 * kWidth}, 4 * kWidth),
               add({kWidth}, kWidth),
               add_ones(kWidth),
               add({kWidth}, kWidth),
               add_ones(kWidth),
               add({kWidth}, kWidth)};
    }
  }
  at::Tensor loss(const at::Tensor& data, const at::Tensor& target) const override {
    auto x = at::embedding(words_, data);
    const auto norm = [](const at::Tensor& y, const at::Tensor& weight, const at::Tensor& bias) {
      return at::layer_norm(y, {kWidth}, weight, bias);
    };
    for (const auto& p : layers_) {
      const auto parts = at::linear(norm(x, p[8], p[9]), p[0], p[1])
                             .view({-1, kLength, 3, kHeads, kWidth / kHeads})
                             .permute({2, 0, 3, 1, 4})
                             .unbind();
      auto y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2]);
      x = x + at::linear(y.transpose(1, 2).reshape({-1, kLength, kWidth}), p[2], p[3]);
      y = at::gelu(at::linear(norm(x, p[10], p[11]), p[4], p[5]));
      x = x + at::linear(y, p[6], p[7]);
    }
    return at::cross_entropy_loss(at::linear(x, head_).flatten(0, 1), target.flatten());
  }
  Batch batch() const override {
    return {at::randint(kWords, {16, kLength}, at::kLong),
            at::randint(kWords, {16, kLength}, at::kLong)};
  }

 private:
  at::Tensor words_ = add({kWords, kWidth}, 1), head_ = add({kWords, kWidth}, kWidth);
  std::array<std::vector<at::Tensor>, kLayers> layers_;
};

std::function<void()> make_step(const std::shared_ptr<Net>& net, const std::string& mode) {
  const auto batch = net->batch();
  const auto update = [net] {
    const at::NoGradGuard no_grad;
    for (const auto& parameter : net->parameters()) {
      parameter.add_(parameter.grad(), -kLearningRate);
      parameter.mutable_grad().reset();
    }
  };
  if (mode == "hand") {
    return [net, batch, update] {
      net->loss(batch.first, batch.second).backward();
      update();
    };
  }
  TORCH_CHECK_VALUE(mode == "sizer", "unknown mode (mode: ", mode, ")");
  const c10::Device cpu(c10::DeviceType::CPU);
  const auto sizer = std::make_shared<brimful::BatchSizer>(
      brimful::StepGroup({}, net->parameters()), brimful::Transaction({}, {cpu}));
  return [net, batch, update, sizer] {
    sizer->step(batch, [&](const Batch& piece) { return net->loss(piece.first, piece.second); });
    update();
  };
}
}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: %s cnn|encoder hand|sizer WARM_UP STEPS\n", argv[0]);
    return 2;
  }
  try {
    at::set_num_threads(1);
    brimful::memory::install();  // the same allocator for both
    at::manual_seed(0);
    const std::string name = argv[1];
    TORCH_CHECK_VALUE(name == "cnn" || name == "encoder", "unknown model (model: ", name, ")");
    std::shared_ptr<Net> net;
    if (name == "cnn") {
      net = std::make_shared<Cnn>();
    } else {
      net = std::make_shared<Encoder>();
    }
    const auto step = make_step(net, argv[2]);
    for (int i = std::stoi(argv[3]); i > 0; --i) {
      step();
    }
    for (int i = std::stoi(argv[4]); i > 0; --i) {
      brimful_bench_step(step);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
