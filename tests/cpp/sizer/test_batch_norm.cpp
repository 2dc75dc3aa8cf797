// What a sizer does about torch::nn's BatchNorm when it splits a batch.
#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>
#include "support/catch.h"
#include "support/sizer_test.h"

#include <brimful/sizer/batch_norms.h>

#include <cmath>

namespace test_batch_norm {

using namespace brimful;
using namespace brimful::test;

namespace {
constexpr int64_t kRows = 12;
constexpr int64_t kWidth = 4;
constexpr int64_t kLength = 3;

at::Tensor rows(int64_t begin = 0, int64_t end = kRows) {
  return filled({kRows, kWidth, kLength}, 3).slice(0, begin, end);
}

bool close(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](auto& x, auto& y) {
           return at::allclose(x, y, 1e-5, 1e-6);
         });
}

struct Model : torch::nn::Module {};

/// A model with one BatchNorm, and a sizer for it.
struct Trained {
  explicit Trained(BatchNormPolicy policy, std::optional<double> momentum = 0.1)
      : norm(torch::nn::BatchNormOptions(kWidth).momentum(momentum)),
        sizer(StepGroup({}, norm->parameters()), Transaction(norm->buffers(), {}),
              options(policy, norm)) {}

  static BatchSizerOptions options(BatchNormPolicy policy, const torch::nn::BatchNorm1d& norm) {
    Model model;
    model.register_module("norm", norm);
    BatchSizerOptions made;
    made.batch_norm = policy;
    made.batch_norms = batch_norms_of(model);
    return made;
  }

  Outcome step(const Split& split, const std::function<void(int64_t piece)>& before = {},
               const std::function<void()>& before_backward = {}) {
    for (auto& parameter : norm->parameters()) {
      parameter.mutable_grad().reset();
    }
    int64_t piece = 0;
    const PieceWork work{[&](int64_t begin, int64_t end) {
                           if (before) {
                             before(piece++);
                           }
                           const auto loss = norm(rows(begin, end)).square().mean();
                           return PieceLoss{loss, static_cast<double>(end - begin)};
                         },
                         [&](const at::Tensor& loss, const at::Tensor& gradient) {
                           if (before_backward) {
                             before_backward();
                           }
                           run_backward(loss, gradient);
                         }};
    return sizer.step(input_of(kRows, split), work);
  }

  bool as_before(std::optional<double> momentum = 0.1) const {
    return norm->options.momentum() == momentum && norm->options.track_running_stats();
  }

  torch::nn::BatchNorm1d norm;
  BatchSizer sizer;
};
}  // namespace

TEST_CASE("BatchNorm modules are found with their names", "[sizer][batch norm]") {
  const auto inner = std::make_shared<Model>();
  inner->register_module("flat", torch::nn::BatchNorm2d(2));
  inner->register_module("deep", torch::nn::BatchNorm3d(2));
  Model model;
  model.register_module("first", torch::nn::BatchNorm1d(2));
  model.register_module("inner", inner);
  std::vector<std::string> names;
  for (const auto& module : batch_norms_of(model)) {
    names.push_back(module.name);
  }
  CHECK(names == std::vector<std::string>{"first", "inner.flat", "inner.deep"});
}

TEST_CASE("One warning names the BatchNorm modules at the first split", "[sizer][batch norm]") {
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, const std::string& line) { lines.push_back(line); });
  Trained trained(BatchNormPolicy::warn);
  trained.step({kRows});
  CHECK(lines.empty());
  trained.step({6, 6});
  trained.step({6, 6});
  set_log_sink(nullptr);
  REQUIRE(lines.size() == 1);
  CHECK_THAT(lines[0], Catch::Contains("(modules: norm); use GroupNorm"));
}

TEST_CASE("Frozen running statistics are those of the first piece", "[sizer][batch norm]") {
  const auto momentum = GENERATE(std::optional<double>(0.1), std::optional<double>());
  Trained trained(BatchNormPolicy::freeze, momentum);
  torch::nn::BatchNorm1d alone(torch::nn::BatchNormOptions(kWidth).momentum(momentum));
  for (int step = 0; step < 2; ++step) {
    trained.step({5, 3, 4});
    alone->forward(rows(0, 5));
  }
  CHECK(same_bits(trained.norm->buffers(), alone->buffers()));
  CHECK(trained.as_before(momentum));
}

TEST_CASE("Rescaled pieces move running statistics as one batch does", "[sizer][batch norm]") {
  const auto momentum = GENERATE(std::optional<double>(0.1), std::optional<double>());
  const auto split = GENERATE(values<Split>({{4, 4, 4}, {7, 2, 3}, {1, 11}}));
  Trained trained(BatchNormPolicy::rescale, momentum);
  torch::nn::BatchNorm1d whole(torch::nn::BatchNormOptions(kWidth).momentum(momentum));
  for (int step = 0; step < 3; ++step) {
    trained.step(split);
    whole->forward(rows());
    CHECK(close(trained.norm->buffers(), whole->buffers()));
  }
  CHECK(trained.as_before(momentum));
}

TEST_CASE("A forward that backward repeats does not count", "[sizer][batch norm]") {
  Trained trained(BatchNormPolicy::rescale);
  trained.step({7, 5}, {}, [&] { trained.norm->forward(rows(0, 3)); });
  torch::nn::BatchNorm1d whole(kWidth);
  whole->forward(rows());
  CHECK(close(trained.norm->buffers(), whole->buffers()));
}

TEST_CASE("A BatchNorm that is called twice moves twice", "[sizer][batch norm]") {
  Trained trained(BatchNormPolicy::rescale);
  const Split split{7, 5};
  int64_t begin = 0;
  trained.step(split, [&](int64_t piece) {  // behind the first call there is the step's own
    trained.norm->forward(rows(begin, begin + split[piece]) + 5);
    begin += split[piece];
  });
  torch::nn::BatchNorm1d whole(kWidth);
  whole->forward(rows() + 5);
  whole->forward(rows());
  CHECK(close(trained.norm->buffers(), whole->buffers()));
}

TEST_CASE("Where its calls are not seen a BatchNorm moves by a share for each piece",
          "[sizer][batch norm]") {
  const auto momentum = GENERATE(std::optional<double>(0.1), std::optional<double>());
  torch::nn::BatchNorm1d norm(torch::nn::BatchNormOptions(kWidth).momentum(momentum));
  auto options = Trained::options(BatchNormPolicy::rescale, norm);
  options.batch_norms[0].buffers = [norm] {  // as if forward cast them
    return BatchNormBuffers{norm->running_mean.clone(), norm->running_var.clone(),
                            norm->num_batches_tracked};
  };
  BatchNorms norms(BatchNormPolicy::rescale, options.batch_norms);
  auto expected = at::zeros({kWidth}, at::kDouble);
  for (int64_t piece = 0; piece < 3; ++piece) {
    const auto x = rows(4 * piece, 4 * piece + 4);
    norms.forward(piece, 3, [&] { return norm->forward(x); });
    const double share = momentum ? 1 - std::cbrt(0.9) : 1 / static_cast<double>(piece + 1);
    expected = expected * (1 - share) + x.to(at::kDouble).mean(at::IntArrayRef{0, 2}) * share;
  }
  norms.finish();
  norms.after_step();
  CHECK(at::allclose(norm->running_mean.to(at::kDouble), expected, 1e-5, 1e-7));
  CHECK(norm->num_batches_tracked.item<int64_t>() == 1);
  CHECK(norm->options.momentum() == momentum);
}

TEST_CASE("A retry or an error leaves BatchNorm as it was", "[sizer][batch norm]") {
  const Quiet quiet;
  const auto policy = GENERATE(BatchNormPolicy::freeze, BatchNormPolicy::rescale);
  Trained trained(policy);
  const auto outcome = trained.step(
      {6, 6}, [](int64_t piece) { TORCH_CHECK_WITH(OutOfMemoryError, piece != 1, "planted"); });
  REQUIRE(outcome.retries == 1);
  CHECK(trained.as_before());
  Trained clean(policy);
  clean.step(outcome.split);
  CHECK(same_bits(trained.norm->buffers(), clean.norm->buffers()));

  const auto before = copies(trained.norm->buffers());
  const auto caught = catching([&] {
    trained.step({6, 6}, [](int64_t piece) {
      if (piece == 1) {
        throw std::runtime_error("planted");
      }
    });
  });
  CHECK(caught.type == Type::runtime_error);
  CHECK(trained.as_before());
  CHECK(same_bits(trained.norm->buffers(), before));
}

TEST_CASE("A split that is refused does not begin", "[sizer][batch norm]") {
  const Quiet quiet;
  Trained trained(BatchNormPolicy::refuse);
  int64_t calls = 0;
  const auto caught = catching([&] { trained.step({6, 6}, [&](int64_t) { ++calls; }); });
  CHECK(caught.type == Type::value_error);
  CHECK_THAT(caught.text,
             Catch::Contains("(batch_norm: refuse, pieces: 2, BatchNorm modules: norm)"));
  CHECK(calls == 0);
  const auto too_large = catching([&] {
    trained.step({kRows}, [&](int64_t) {
      ++calls;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "planted");
    });
  });
  CHECK(too_large.type == Type::batch_too_large);
  CHECK_THAT(too_large.text, Catch::Contains("batch_norm: refuse"));
  CHECK(calls == 1);
  trained.norm->eval();
  CHECK(trained.step({6, 6}).pieces == 2);
}

}  // namespace test_batch_norm
