// The program of docs/tutorials/cpp.md: each rank trains on its share of random points.
#include <brimful/brimful.h>
#include <brimful/launch/checkpoint.h>
#include <torch/torch.h>

#include <cstdio>
#include <memory>

namespace {

struct Net : torch::nn::Module {
  torch::nn::Linear hidden{64, 256};
  torch::nn::Linear out{256, 10};
  Net() {
    register_module("hidden", hidden);
    register_module("out", out);
  }
  torch::Tensor forward(const torch::Tensor& x) { return out(torch::relu(hidden(x))); }
};

/// Points of ten classes; a class is where the largest of the first ten coordinates is.
struct Points : torch::data::datasets::Dataset<Points> {
  torch::Tensor points = torch::randn({2000, 64});

  torch::data::Example<> get(size_t index) override {
    const auto point = points[static_cast<int64_t>(index)];
    return {point, point.slice(0, 0, 10).argmax()};
  }
  std::optional<size_t> size() const override { return points.size(0); }
};

void train() {
  constexpr size_t batch_size = 256;
  torch::manual_seed(0);
  const auto data = Points().map(torch::data::transforms::Stack<>());
  const auto size = *data.size();
  auto group = brimful::init_from_env();        // torchrun's; gloo, and NCCL where there is CUDA
  auto loader = torch::data::make_data_loader(  // each sample to exactly one rank, in a new order
      data, brimful::DistributedSampler(size, group->getRank(), group->getSize()), batch_size);
  brimful::DistributedDataParallel<Net> model(std::make_shared<Net>(), group);
  torch::optim::SGD optimizer(model.module()->parameters(), 0.5);
  brimful::BatchSizer sizer(model);
  const auto loss_fn = [&](const torch::data::Example<>& piece) {
    return torch::nn::functional::cross_entropy(model(piece.data), piece.target);
  };
  for (int epoch = 0; epoch < 5; ++epoch) {
    for (const auto& batch : sizer.batches(*loader)) {
      sizer.step(batch, loss_fn);
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  brimful::save_on_rank0(group, "model.pt", model.module());  // <brimful/launch/checkpoint.h>

  const auto points = torch::randn({10000, 64});
  const auto classes = brimful::map_batches(
      [&](const torch::Tensor& piece) { return model.module()->forward(piece).argmax(1); }, points);
  const auto right = classes == points.slice(1, 0, 10).argmax(1);
  std::printf("rank %d: %.0f %% right\n", group->getRank(),
              100 * right.to(at::kFloat).mean().item<double>());
}

}  // namespace

int main() {
  try {
    brimful::memory::set_limit_auto(at::kCPU);  // a full container: an exception, not a kill
    train();
  } catch (const brimful::BatchTooLarge& error) {  // not even one row fits
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return 1;
  } catch (const brimful::RankFailed& error) {  // another rank raised; its text is in the message
    std::fprintf(stderr, "rank %d failed: %s\n", error.rank(), error.what_without_backtrace());
    return 1;
  }
}
