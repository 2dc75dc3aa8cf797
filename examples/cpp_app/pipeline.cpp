// A model in two stages, each with a thread and a device of its own: it trains on random points of ten classes, and infers.
#include <brimful/brimful.h>
#include <brimful/pipeline/nn_stages.h>
#include <torch/torch.h>

#include <cstdio>
#include <string>
#include <vector>

namespace pipeline = brimful::pipeline;
namespace nn = torch::nn;

namespace {
constexpr int64_t kRows = 512;
constexpr int kSteps = 60;

/// Two CUDA devices, or the CPU twice.
std::vector<c10::Device> two_devices() {
  if (torch::cuda::device_count() > 1) {
    return {{at::kCUDA, 0}, {at::kCUDA, 1}};
  }
  return {at::kCPU, at::kCPU};
}

/// A point's class is where the largest of its first ten coordinates is.
torch::Tensor classes_of(const torch::Tensor& points) {
  return points.slice(1, 0, 10).argmax(1);
}

void train() {
  torch::manual_seed(0);
  nn::Sequential model(nn::Linear(64, 256), nn::BatchNorm1d(256), nn::ReLU(), nn::Linear(256, 256),
                       nn::ReLU(), nn::Linear(256, 10));
  pipeline::PipelineOptions options;
  options.devices = two_devices();
  options.microbatches = 8;
  options.schedule = "zb_h1";
  options.batch_norm = brimful::BatchNormPolicy::rescale;
  std::vector<pipeline::Stage> stages;
  for (auto& part : pipeline::split_sequential(model, {3, 3})) {
    part->to(options.devices[stages.size()]);
    stages.push_back(pipeline::stage_of(part, "part " + std::to_string(stages.size())));
  }
  pipeline::Pipeline pipe(stages, options);
  const auto loss_fn = [](const torch::Tensor& output, const torch::Tensor& target) {
    return nn::functional::cross_entropy(output, target.to(output.device()));
  };
  torch::optim::SGD optimizer(model->parameters(), 0.5);
  for (int step = 0; step < kSteps; ++step) {
    const auto points = torch::randn({kRows, 64});
    const auto outcome = pipe.step(points, classes_of(points), loss_fn);
    optimizer.step();
    optimizer.zero_grad();
    if (step == 0 || step + 1 == kSteps) {
      std::printf("step %d: loss %.3f, %d microbatches\n", step, outcome.loss.value(),
                  static_cast<int>(outcome.pieces));
    }
  }
  std::printf("%s\n", pipe.to_string().c_str());

  model->eval();
  const auto points = torch::randn({2000, 64});
  const auto output = pipe.forward(points).tensors[0].cpu();
  const auto right = output.argmax(1) == classes_of(points);
  std::printf("%.0f %% right\n", 100 * right.to(at::kFloat).mean().item<double>());
}
}  // namespace

int main() {
  try {
    train();
  } catch (const brimful::BatchTooLarge& error) {  // not even one row a microbatch fits
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return 1;
  }
}
