// Pipelines whose ranks are on devices of their own: streams that are late, and messages as over NCCL.
#include "support/catch.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <brimful/error.h>
#include <brimful/launch/run_ranks.h>
#include <brimful/pipeline/pipeline.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>

#include "pipeline/transport/peers.h"
#include "support/checks.h"
#include "support/fake_nccl.h"
#include "support/gpu.h"
#include "support/quiet_log.h"
#include "support/slow_device.h"
#include "support/stages.h"
#include "support/watchdog.h"

namespace test_pipeline_devices {

using namespace brimful;
using namespace brimful::test;
using pipeline::Pipeline;
using pipeline::PipelineOptions;
namespace slow = brimful::test::slow_device;

namespace {
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
constexpr int64_t kRows = 11;
constexpr int64_t kColumns = 16;
constexpr int kMicrobatches = 4;

/// What a pipeline asks of a device type: a generator, whose state steps keep. Autograd's engine asks for streams of the
/// one type that it takes for the accelerator, which a type with a name of its own is.
struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};

void install_device() {
  slow::install();
  static const bool once = [] {
    slow::tell_engine(3);
    c10::register_privateuse1_backend("slow");
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
  }();
  (void)once;
}

/// By the device: y = factor * x, element by element, now and then after a nap.
void enqueue_scale(const at::Tensor& x, const at::Tensor& y, double factor) {
  const auto* const from = x.const_data_ptr<double>();
  auto* const to = y.mutable_data_ptr<double>();
  slow::enqueue(x.device(), [=, count = x.numel()] {
    if (count % 3 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
    for (int64_t i = 0; i < count; ++i) {
      to[i] = factor * from[i];
    }
  });
}

struct Seen {
  std::atomic<int> wrong{0};
  std::atomic<int> backwards{0};
};

/// A stage's numbers: what it multiplies by, and what the gradient of its output is of its input.
struct Factors {
  double forward = 1;
  double gradient_of_input = 1;
  Seen* seen = nullptr;
};

/// Looks at the gradient that comes, and overwrites at once what was let go of.
struct Scale : torch::autograd::Function<Scale> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight, const Factors* factors) {
    (void)weight;
    context->saved_data["factors"] = reinterpret_cast<int64_t>(factors);
    context->save_for_backward({x});
    auto y = at::empty(x.sizes(), x.options());
    enqueue_scale(x, y, factors->forward);
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto& factors = *reinterpret_cast<const Factors*>(context->saved_data["factors"].toInt());
    const auto x = context->get_saved_variables()[0];
    const auto& gradient = gradients[0];
    const auto* const from = x.const_data_ptr<double>();
    const auto* const came = gradient.const_data_ptr<double>();
    slow::enqueue(x.device(), [=, count = x.numel()] {
      for (int64_t i = 0; i < count; ++i) {
        const double expected = factors.gradient_of_input * from[i];
        if (!(std::abs(came[i] - expected) <= 1e-12 * std::abs(expected))) {
          ++factors.seen->wrong;
          return;
        }
      }
    });
    ++factors.seen->backwards;
    auto of_x = at::empty(x.sizes(), x.options());
    enqueue_scale(gradient, of_x, factors.forward);
    return {of_x, at::Tensor(), at::Tensor()};
  }
};

PieceLoss half_square(const at::Tensor& output, const at::Tensor& target) {
  const auto y = output.to(c10::DeviceType::CPU);
  return {(y * y).mean() / 2, static_cast<double>(target.size(0))};
}

struct Case {
  std::string schedule;
  int ranks;
  int per_rank;
  bool recomputes = true;
};

std::shared_ptr<pipeline::Peers> peers_with_fake(const Group& group) {
  return std::make_shared<pipeline::Peers>(
      group, [](const std::string& name, pipeline::DeviceLane::End end) {
        return c10::make_intrusive<FakeNccl>(name, static_cast<int>(end));
      });
}

/// One rank's stages, on a device of its own.
struct Rank {
  Rank(const Group& group, const Case& wanted)
      : device(slow::device(group->getRank())), guard(device) {
    const int stages = wanted.ranks * wanted.per_rank;
    double all = 1;
    for (int k = 0; k < stages; ++k) {
      all *= factor_of(k);
    }
    double before = 1;  // product of the factors of the stages before
    std::vector<pipeline::Stage> own;
    factors.reserve(stages);
    for (int k = 0; k < stages; before *= factor_of(k++)) {
      const int place = wanted.schedule == "zbv" ? std::min(k, stages - 1 - k) : k % wanted.ranks;
      if (place != group->getRank()) {
        continue;
      }
      const double behind = all / before;  // with its own
      factors.push_back({factor_of(k), behind * behind / factor_of(k) / (kRows * kColumns), &seen});
      const auto weight =
          at::empty({1}, at::TensorOptions(device).dtype(at::kDouble)).set_requires_grad(true);
      own.push_back(pipeline::make_stage(
          [weight, numbers = &factors.back()](const at::Tensor& x) {
            return Scale::apply(x, weight, numbers);
          },
          {weight}));
    }
    loss = (x * x).mean().item<double>() * all * all / 2;
    whole = x * all;
    PipelineOptions options;
    options.peers = peers_with_fake(group);
    options.devices = {device};
    options.schedule = wanted.schedule;
    options.microbatches = kMicrobatches;
    options.recompute = wanted.recomputes;
    options.before_action = [this](int, int index, const pipeline::Action&) {
      if (index == 0) {
        slow::refuse_memory(std::exchange(refusals, 0));  // the first to ask is a payload
      }
      if (index == fail_at && fail_left-- > 0) {
        TORCH_CHECK_WITH(OutOfMemoryError, !out_of_memory, "planted");
        throw std::runtime_error("planted");
      }
    };
    pipe = std::make_unique<Pipeline>(std::move(own), std::move(options));
  }
  static double factor_of(int stage) { return 1 + 0.25 * (stage + 1); }

  /// The loss is right, and so are all gradients, when the devices are through.
  bool steps_well(int64_t* retries = nullptr) {
    seen.backwards = 0;
    const auto outcome = pipe->step(x, x, half_square);
    if (retries != nullptr) {
      *retries = outcome.retries;
    }
    return std::abs(outcome.loss - loss) < 1e-12 * loss && seen.wrong == 0 &&
           seen.backwards >= std::ssize(factors) * kMicrobatches;
  }

  /// Waits until this rank's device has computed what it was asked to.
  void settle() const {
    std::atomic<bool> done{false};
    slow::enqueue(device, [&] {
      done = true;
      done.notify_all();
    });
    done.wait(false);
  }

  c10::Device device;
  c10::DeviceGuard guard;
  at::Tensor x = filled({kRows, kColumns}, 3, at::kDouble) + 1.5;
  double loss = 0;
  at::Tensor whole;
  Seen seen;
  std::vector<Factors> factors;
  int fail_at = -1;
  int fail_left = 0;
  bool out_of_memory = false;
  int refusals = 0;
  std::unique_ptr<Pipeline> pipe;
};

/// What a step throws: the message, with the type in front where it is RankFailed.
std::string thrown_by(Rank& rank) {
  try {
    rank.pipe->step(rank.x, rank.x, half_square);
  } catch (const RankFailed& error) {
    return "RankFailed: " + std::string(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}
}  // namespace

TEST_CASE("Processes on devices give right losses and gradients", "[pipeline][lanes]") {
  const Watchdog watchdog("processes on devices", std::chrono::seconds(60));
  install_device();
  const auto wanted = GENERATE(values<Case>({{"1f1b", 2, 1},
                                             {"gpipe", 3, 1},
                                             {"interleaved_1f1b", 2, 2},
                                             {"zb_h1", 3, 1},
                                             {"zbv", 2, 2}}));
  CAPTURE(wanted.schedule);
  Checks checks;
  const auto aborts = FakeNccl::aborts.load();
  run_ranks({wanted.ranks}, [&](int rank, const Group& group) {
    Rank own(group, wanted);
    for (int step = 0; step < 3; ++step) {
      checks.expect(own.steps_well(),
                    "step " + std::to_string(step) + " of rank " + std::to_string(rank));
    }
    const auto output = own.pipe->forward(own.x.narrow(0, 0, 1));  // in one microbatch
    checks.expect(output.tensors.empty() || at::allclose(output.tensors[0].to(c10::DeviceType::CPU),
                                                         own.whole.narrow(0, 0, 1), 1e-12, 0),
                  "outputs");
    own.settle();
    checks.expect(own.seen.wrong == 0, "gradients of rank " + std::to_string(rank));
  });
  CHECK(checks.failures().empty());
  CHECK(FakeNccl::aborts > aborts);  // when all was done
}

TEST_CASE("Whatever fails in a process on a device, all return and go on",
          "[pipeline][lanes][faults]") {
  const QuietLog quiet;
  const Watchdog watchdog("faults on devices", std::chrono::seconds(110));
  install_device();
  const auto wanted = GENERATE(values<Case>({{"1f1b", 2, 1}, {"zbv", 2, 2}}));
  const bool out_of_memory = GENERATE(false, true);
  CAPTURE(wanted.schedule, out_of_memory);
  Checks checks;
  run_ranks({wanted.ranks}, [&](int rank, const Group& group) {
    const auto order = Rank(group, wanted).pipe->schedule(kMicrobatches);
    for (int failing = 0; failing < wanted.ranks; ++failing) {
      for (int index = 0; index < std::ssize(order.ranks[failing]); ++index) {
        const auto name = "rank " + std::to_string(failing) + ", action " + std::to_string(index);
        Rank own(group, wanted);
        own.out_of_memory = out_of_memory;
        own.fail_at = index;
        own.fail_left = rank == failing ? 1 : 0;
        const auto began = std::chrono::steady_clock::now();
        const auto text = thrown_by(own);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
        checks.expect(took.count() < 5, name + ": returns in time");
        checks.expect(out_of_memory
                          ? text.empty()
                          : text.find(rank == failing ? "planted (in the " : "RankFailed: ") == 0,
                      name + ": " + text);
        checks.expect(own.steps_well(), name + ": the next step");
        own.settle();
        checks.expect(own.seen.wrong == 0, name + ": gradients");
      }
    }
  });
  CHECK(checks.failures().empty());
}

TEST_CASE("A communicator that fails ends the step on all ranks, and the next one has new ones",
          "[pipeline][lanes][faults]") {
  const QuietLog quiet;
  const Watchdog watchdog("communicators that fail", std::chrono::seconds(60));
  install_device();
  Checks checks;
  run_ranks({3}, [&](int rank, const Group& group) {
    Rank own(group, {"1f1b", 3, 1});
    checks.expect(own.steps_well(), "first step");
    for (int round = 0; round < 3; ++round) {
      group->barrier()->wait();
      if (rank == 1) {
        FakeNccl::failures_left = 1;
      }
      group->barrier()->wait();
      checks.expect(!thrown_by(own).empty(), "fails on rank " + std::to_string(rank));
      checks.expect(own.steps_well(), "goes on on rank " + std::to_string(rank));
    }
    own.settle();
    checks.expect(own.seen.wrong == 0, "gradients of rank " + std::to_string(rank));
  });
  CHECK(checks.failures().empty());
}

TEST_CASE("Ranks whose devices cannot be connected say so, all of them",
          "[pipeline][lanes][faults]") {
  const QuietLog quiet;
  const Watchdog watchdog("devices that cannot be connected", std::chrono::seconds(60));
  install_device();
  Checks checks;
  run_ranks({3}, [&](int rank, const Group& group) {
    Rank own(group, {"1f1b", 3, 1});
    group->barrier()->wait();
    if (rank == 0) {
      FakeNccl::failures_left = 4;  // of both pairs, at both ends
    }
    group->barrier()->wait();
    checks.expect(!thrown_by(own).empty(), "fails on rank " + std::to_string(rank));
    checks.expect(own.steps_well(), "goes on on rank " + std::to_string(rank));
    own.settle();
  });
  CHECK(checks.failures().empty());
}

TEST_CASE("A payload that finds no memory has the step repeated", "[pipeline][lanes][faults]") {
  const QuietLog quiet;
  const Watchdog watchdog("payloads without memory", std::chrono::seconds(60));
  install_device();
  Checks checks;
  for (const int refusals :
       {1, 1000}) {  // of the receive alone, and of what would let go of it too
    CAPTURE(refusals);
    run_ranks({2}, [&](int rank, const Group& group) {
      Rank own(group, {"1f1b", 2, 1});
      checks.expect(own.steps_well(), "first step");
      own.refusals = rank == 1 ? refusals : 0;
      int64_t retries = 0;
      checks.expect(own.steps_well(&retries) && retries == 1,
                    "is repeated on rank " + std::to_string(rank));
      checks.expect(own.steps_well(), "goes on on rank " + std::to_string(rank));
      own.settle();
      checks.expect(own.seen.wrong == 0, "gradients");
    });
  }
  CHECK(checks.failures().empty());
}

TEST_CASE("A shortage on a device whose memory is not counted is said as one",
          "[pipeline][lanes][faults]") {
  const QuietLog quiet;
  const Watchdog watchdog("a device that is too small", std::chrono::seconds(60));
  install_device();
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Rank own(group, {"1f1b", 2, 1, false});  // the device has no operator to compare with
    if (rank == 1) {
      own.fail_at = 0;
      own.fail_left = 1000;
      own.out_of_memory = true;
    }
    const auto text = thrown_by(own);
    const auto* const expected =
        rank == 1 ? "no number of microbatches fits on rank 1 of 2 (device: slow:1"
                  : "RankFailed: the pipeline's step ran out of memory on rank 1";
    checks.expect(text.find(expected) == 0, "rank " + std::to_string(rank) + ": " + text);
    own.fail_left = 0;
    checks.expect(own.steps_well(), "goes on on rank " + std::to_string(rank));
    own.settle();
  });
  CHECK(checks.failures().empty());
}

TEST_CASE("Ranks on devices of different kinds are refused", "[pipeline][lanes]") {
  const QuietLog quiet;
  const Watchdog watchdog("kinds of devices");
  install_device();
  Checks checks;
  run_ranks({2}, [&](int rank, const Group& group) {
    Layers model(2);
    PipelineOptions options;
    options.peers = peers_with_fake(group);
    std::vector<pipeline::Stage> stages;
    if (rank == 0) {
      stages.push_back(pipeline::make_stage(model.layers[0], model.layers[0].parameters()));
    } else {
      options.devices = {slow::device(0)};
      stages.push_back(pipeline::make_stage([](const at::Tensor& x) { return x; }, {}));
    }
    Pipeline pipe(std::move(stages), std::move(options));
    std::string text;
    try {
      pipe.forward(filled({4, 4}, 3, at::kDouble));
    } catch (const c10::ValueError& error) {
      text = error.what();
    }
    checks.expect(text.find("kind of device") != std::string::npos, text);
  });
  CHECK(checks.failures().empty());
}

TEST_CASE("Ranks on CUDA devices give the gradients of the whole model", "[pipeline][lanes][gpu]") {
  BRIMFUL_NEEDS_GPUS(2);
  const Watchdog watchdog("ranks on CUDA devices", std::chrono::seconds(120));
  const auto wanted = GENERATE(
      values<Case>({{"1f1b", 2, 1}, {"interleaved_1f1b", 2, 2}, {"zb_h1", 2, 1}, {"zbv", 2, 2}}));
  CAPTURE(wanted.schedule);
  Checks checks;
  const std::vector<c10::Device> devices{c10::Device("cuda:0"), c10::Device("cuda:1")};
  run_ranks(
      devices,
      [&](int rank, c10::Device device, const Group& group) {
        Layers model(2 * wanted.per_rank);
        auto x = filled({kRows, 4}, 3, at::kDouble);
        auto y = filled({kRows, 4}, 4, at::kDouble);
        mse(model(x), y).backward();
        const auto expected = model.gradients();
        std::vector<Layer> layers;
        std::vector<pipeline::Stage> own;
        std::vector<int> numbers;
        for (int i = 0; i < 2 * wanted.per_rank; ++i) {
          const int place = wanted.schedule == "zbv" ? std::min(i, 3 - i) : i % 2;
          if (place == rank) {
            auto layer = model.layers[i];
            layer.weight = layer.weight.detach().to(device).set_requires_grad(true);
            layer.bias = layer.bias.detach().to(device).set_requires_grad(true);
            own.push_back(pipeline::make_stage(layer, layer.parameters()));
            layers.push_back(layer);
            numbers.push_back(i);
          }
        }
        PipelineOptions options;
        options.peers = pipeline::peers_of(group);
        options.devices = {device};
        options.schedule = wanted.schedule;
        options.microbatches = kMicrobatches;
        int fail_left = 0;
        options.before_action = [&](int, int index, const pipeline::Action&) {
          if (index == 3 && fail_left-- > 0) {
            throw std::runtime_error("planted");
          }
        };
        Pipeline pipe(std::move(own), std::move(options));
        const auto target = y.to(device);
        for (int step = 0; step < 6; ++step) {
          fail_left = step % 3 == 1 && rank == step / 3 ? 1 : 0;
          bool failed = false;
          try {
            pipe.step(x, target, mse);
          } catch (const std::exception&) {
            failed = true;
          }
          checks.expect(failed == (step % 3 == 1), "step " + std::to_string(step));
          for (size_t i = 0; i < layers.size() && !failed; ++i) {
            checks.expect(
                at::allclose(layers[i].weight.grad().cpu(), expected[2 * numbers[i]], 1e-10, 1e-12),
                "gradients of rank " + std::to_string(rank));
            layers[i].weight.mutable_grad().reset();
            layers[i].bias.mutable_grad().reset();
          }
        }
      },
      std::chrono::seconds(60));
  CHECK(checks.failures().empty());
}

}  // namespace test_pipeline_devices
