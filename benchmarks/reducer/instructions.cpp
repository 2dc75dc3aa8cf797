// Steps for callgrind to count: `instructions bare|brimful|torch|torch_view WARM_UP STEPS`. One rank, 400 linear layers.
// Only what runs inside of brimful_bench_step is to be counted (--toggle-collect).
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <brimful/launch/run_ranks.h>
#include <brimful/reducer/distributed_data_parallel.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "reducer/whole_path.h"

extern "C" __attribute__((noinline)) void brimful_bench_step(const std::function<void()>& step) {
  step();
}

namespace {
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Step = std::function<void()>;
constexpr int64_t kLayers = 400;
constexpr int64_t kWidth = 64;
constexpr int64_t kBatch = 8;

/// What brimful::DistributedDataParallel needs of a module; torch/torch.h would take half a minute to compile.
class Net {
 public:
  struct Item {
    std::string name;
    at::Tensor tensor;
    const std::string& key() const { return name; }
    const at::Tensor& value() const { return tensor; }
  };

  Net() {
    for (int64_t i = 0; i < kLayers; ++i) {
      const auto layer = std::to_string(i);
      // This deviation keeps gradients at their size: denormals would take longer.
      add(layer + ".weight", at::randn({kWidth, kWidth}) / std::sqrt(double(kWidth)));
      add(layer + ".bias", at::zeros({kWidth}));
    }
  }

  at::Tensor forward(at::Tensor x) const {
    for (size_t i = 0; i < items_.size(); i += 2) {
      x = at::linear(x, items_[i].tensor, items_[i + 1].tensor);
    }
    return x;
  }

  const std::vector<Item>& named_parameters() const { return items_; }
  std::vector<at::Tensor> buffers() const { return {}; }

  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> tensors;
    for (const auto& item : items_) {
      tensors.push_back(item.tensor);
    }
    return tensors;
  }

  void zero_grad() const {
    for (const auto& item : items_) {
      item.tensor.mutable_grad().reset();
    }
  }

 private:
  void add(std::string name, const at::Tensor& value) {
    items_.push_back({std::move(name), value.detach().requires_grad_()});
  }
  std::vector<Item> items_;
};

/// What torch's DistributedDataParallel does around forward and backward, in Python's place.
Step torch_step(const std::shared_ptr<Net>& net, const at::Tensor& x, const Group& group,
                bool as_view) {
  const auto parameters = net->parameters();
  std::vector<size_t> all(parameters.size());
  std::iota(all.begin(), all.end(), size_t{0});
  const auto reducer = std::make_shared<c10d::Reducer>(
      parameters, std::vector<std::vector<size_t>>{all}, group,
      std::vector<bool>(parameters.size(), false), c10d::kDefaultBucketBytesCap,
      /*find_unused_parameters=*/false, as_view, std::unordered_map<size_t, std::string>{},
      c10d::kDefaultFirstBucketBytes, /*skip_all_reduce_unused_params=*/false,
      /*use_python_reducer=*/false, std::vector<int64_t>{});
  return [net, x, reducer] {
    net->zero_grad();
    reducer->prepare_for_forward();
    if (reducer->should_rebuild_buckets()) {
      reducer->rebuild_buckets();
    }
    const auto output = net->forward(x);
    reducer->prepare_for_backward({output});
    output.sum().backward();
  };
}

Step make_step(const std::string& mode, const Group& group) {
  at::manual_seed(0);
  const auto net = std::make_shared<Net>();
  const auto x = at::randn({kBatch, kWidth});
  if (mode == "bare") {
    return [net, x] {
      net->zero_grad();
      net->forward(x).sum().backward();
    };
  }
  if (mode == "torch" || mode == "torch_view") {
    return torch_step(net, x, group, mode == "torch_view");
  }
  TORCH_CHECK_VALUE(mode == "brimful", "unknown mode (mode: ", mode, ")");
  brimful::ReducerOptions options;
  const brimful::WholePath whole_path;
  options.plan = "registration";  // no change of plan among the few steps that are counted
  const auto model =
      std::make_shared<brimful::DistributedDataParallel<Net>>(net, group, std::move(options));
  return [net, x, model] {
    net->zero_grad();
    (*model)(x).sum().backward();
  };
}
}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s bare|brimful|torch|torch_view WARM_UP STEPS\n", argv[0]);
    return 2;
  }
  try {
    at::set_num_threads(1);
    brimful::RanksOptions options;
    options.world_size = 1;
    options.timeout = std::chrono::minutes(10);  // callgrind is 50 times slower
    brimful::run_ranks(options, [&](int /*rank*/, const Group& group) {
      const auto step = make_step(argv[1], group);
      for (int i = std::stoi(argv[2]); i > 0; --i) {
        step();
      }
      for (int i = std::stoi(argv[3]); i > 0; --i) {
        brimful_bench_step(step);
      }
    });
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::printf("parameters %lld\n", static_cast<long long>(2 * kLayers));
  return 0;
}
