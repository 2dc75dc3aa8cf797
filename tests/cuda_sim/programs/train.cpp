// A program of LibTorch alone: it trains on CUDA, saves the model and loads it again. train FOLDER
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <string>

namespace {

constexpr int64_t kWords = 500;
constexpr int64_t kWidth = 128;

struct Net : torch::nn::Module {
  torch::nn::Embedding words{kWords, kWidth};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({kWidth})};
  torch::nn::Linear inside{kWidth, 4 * kWidth}, outside{4 * kWidth, kWords};

  Net() {
    register_module("words", words);
    register_module("norm", norm);
    register_module("inside", inside);
    register_module("outside", outside);
  }

  at::Tensor forward(const at::Tensor& x) { return outside(at::gelu(inside(norm(words(x))))); }
};

int64_t allocated() {
  return c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[0].current;
}

void train(const std::string& file) {
  const auto net = std::make_shared<Net>();
  net->to(at::kCUDA);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
  int64_t parameters = 0;
  for (const auto& parameter : net->parameters()) {
    parameters += parameter.numel();
  }
  float loss_sum = 0;
  for (int step = 0; step < 3; ++step) {
    const auto batch = at::randint(kWords, {16, 33}, at::kLong).to(at::kCUDA);
    const auto scores = net->forward(batch.slice(1, 0, 32)).flatten(0, 1);
    const auto loss = torch::nn::functional::cross_entropy(scores, batch.slice(1, 1, 33).flatten());
    optimizer.zero_grad();
    loss.backward();
    torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
    optimizer.step();
    loss_sum += loss.item<float>();
  }
  torch::save(net, file);
  auto again = std::make_shared<Net>();
  torch::load(again, file, at::Device(at::kCUDA));
  again->to(at::kCUDA);
  // Parameters, gradients, two moments, and the parameters that were read again.
  std::printf("{\"parameters\": %lld, \"copies\": 5, \"allocated\": %lld, \"loss\": %g}\n",
              static_cast<long long>(parameters), static_cast<long long>(allocated()), loss_sum);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    train(std::string(argc > 1 ? argv[1] : ".") + "/model.pt");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
