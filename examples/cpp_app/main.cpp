// The training of ../train_fashion_mnist.py in C++: same data, same batches, same shortage in the
// middle, and from the same initial parameters the same final ones. See README.md.
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <brimful/launch/init_from_env.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/reducer/distributed_data_parallel.h>
#include <brimful/sizer/batch_sizer.h>
#include <brimful/sizer/map_batches.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "fashion_mnist.h"
#include "parameters.h"

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
namespace memory = brimful::memory;
const c10::Device kCpu(c10::DeviceType::CPU);

struct Net : torch::nn::Module {
  torch::nn::Conv2d conv1{torch::nn::Conv2dOptions(1, 16, 3).padding(1)};
  torch::nn::Conv2d conv2{torch::nn::Conv2dOptions(16, 32, 3).padding(1)};
  torch::nn::Linear fc1{32 * 7 * 7, 128};
  torch::nn::Linear fc2{128, 10};

  Net() {
    register_module("conv1", conv1);
    register_module("conv2", conv2);
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }

  torch::Tensor forward(const torch::Tensor& images) {
    auto x = (images.to(torch::kFloat) - 73) / 90;  // mean and standard deviation of the pixels
    x = torch::max_pool2d(torch::relu(conv1(x)), 2);
    x = torch::max_pool2d(torch::relu(conv2(x)), 2);
    return fc2(torch::relu(fc1(x.flatten(1))));
  }
};
using Model = brimful::DistributedDataParallel<Net>;

/// Takes memory away from this rank, once, inside backward after the first bucket has left; half of
/// the budget comes back after the step.
class Shortage {
 public:
  Shortage(const Model& model, int64_t at_step) : steps_before_(at_step) {
    const brimful::Reducer* reducer = model.reducer().get();
    model.module()->conv2->weight.register_hook([this, reducer](const torch::Tensor&) {
      if (!over_ && !cut_ && steps_before_ <= 0 && reducer->launched() > 0) {
        cut_ = true;
        memory::set_limit(kCpu, memory::stats(kCpu).used_bytes);
        std::printf("  rank %d loses memory inside backward (buckets launched: %lld)\n",
                    reducer->rank(), static_cast<long long>(reducer->launched()));
      }
    });
  }

  void after_step() {
    --steps_before_;
    if (cut_ && !over_) {
      over_ = true;
      memory::set_limit(kCpu, *budget_ / 2);
    }
  }

 private:
  std::optional<int64_t> budget_ = memory::stats(kCpu).limit_bytes;
  int64_t steps_before_;
  bool cut_ = false;
  bool over_ = false;
};

/// Inference: each rank classifies large batches of its share, in pieces that fit its budget.
double accuracy(Net& net, const fashion_mnist::Data& test, const Group& group) {
  const auto batches = fashion_mnist::batches(test, 1000);
  auto right = torch::zeros({1}, torch::kInt64);
  brimful::MapOptions options;
  for (size_t i = group->getRank(); i < batches.size(); i += group->getSize()) {
    const auto& [images, labels] = batches[i];
    int64_t pieces = 0;
    const auto classes = brimful::map_batches(
        [&](const torch::Tensor& piece) {
          ++pieces;
          return net.forward(piece).argmax(1);
        },
        images, options);
    options.pieces = std::max(options.pieces, pieces);  // what fitted fits the next batch
    right += (classes == labels).sum();
  }
  if (group->getRank() == 0) {
    std::printf("inference: batches of 1000 images in %lld pieces\n",
                static_cast<long long>(options.pieces));
  }
  std::vector<torch::Tensor> tensors{right};
  group->allreduce(tensors)->wait();
  return right.item<double>() / static_cast<double>(test.second.size(0));
}

double largest_difference(const Net& net, const Group& group) {
  const torch::NoGradGuard no_grad;
  auto largest = torch::zeros({1});
  for (const auto& parameter : net.parameters()) {
    std::vector<torch::Tensor> of_rank_0{parameter.clone()};
    group->broadcast(of_rank_0)->wait();
    const auto difference = (parameter - of_rank_0[0]).abs().nan_to_num(INFINITY);
    largest = torch::maximum(largest, difference.max());
  }
  std::vector<torch::Tensor> tensors{largest};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  group->allreduce(tensors, options)->wait();
  return largest.item<double>();
}

/// Steps per epoch of the rank with the most data.
int64_t most_batches(size_t own, const Group& group) {
  std::vector<torch::Tensor> tensors{torch::tensor({static_cast<int64_t>(own)})};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  group->allreduce(tensors, options)->wait();
  return tensors[0].item<int64_t>();
}

int train(const Arguments& args) {
  const auto group = brimful::init_from_env(std::chrono::seconds(60));
  const int rank = group->getRank();
  torch::set_num_threads(1);

  const auto test = fashion_mnist::load("t10k", args.data);
  const auto mine = fashion_mnist::share(fashion_mnist::load("train", args.data), args.samples,
                                         rank, group->getSize());
  auto loader = fashion_mnist::batches(mine, args.batch);
  const auto steps_in_all = args.epochs * most_batches(loader.size(), group);

  const auto net = std::make_shared<Net>();
  if (!args.initial_file.empty()) {
    load_parameters(*net, args.initial_file);
  }
  memory::set_limit(kCpu, args.budget_mib << 20);
  brimful::ReducerOptions options;
  options.bucket_cap_mb = options.first_bucket_cap_mb = 0.01;  // small like the model
  Model model(net, group, options);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  brimful::BatchSizer sizer(model);

  std::optional<Shortage> shortage;
  if (rank == args.fault_rank) {
    shortage.emplace(model, steps_in_all / 2);
  }
  const auto loss_fn = [&](const fashion_mnist::Data& piece) {
    return torch::nn::functional::cross_entropy(model(piece.first), piece.second);
  };
  int64_t retries = 0;
  for (int64_t epoch = 0; epoch < args.epochs; ++epoch) {
    for (const auto& batch : sizer.batches(loader)) {
      const auto outcome = sizer.step(batch, loss_fn);
      optimizer.step();
      optimizer.zero_grad();
      if (shortage) {
        shortage->after_step();
      }
      retries += outcome.retries;
      if (rank == 0 && sizer.steps() % 10 == 0) {
        std::printf("step %lld/%lld  pieces %lld  loss %.3f\n",
                    static_cast<long long>(sizer.steps()), static_cast<long long>(steps_in_all),
                    static_cast<long long>(outcome.pieces), outcome.loss.value());
        std::fflush(stdout);
      }
    }
  }

  const double right = accuracy(*net, test, group);
  const double difference = largest_difference(*net, group);
  if (rank == 0) {
    if (!args.final_file.empty()) {
      save_parameters(*net, args.final_file);
    }
    std::printf(
        "retries of rank 0: %lld\ntest accuracy: %.1f %%\nlargest difference of parameters: %g\n",
        static_cast<long long>(retries), 100 * right, difference);
  }
  return difference == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  brimful::set_log_level(brimful::LogLevel::info);
  brimful::set_log_sink([](brimful::LogLevel, const std::string& line) {
    std::printf("  %s\n", line.c_str());
    std::fflush(stdout);
  });
  try {
    return train(parse(argc, argv));
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 1;
}
