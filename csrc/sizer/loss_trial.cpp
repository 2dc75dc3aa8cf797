#include "sizer/loss_trial.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/step/pieces.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/thrown_by.h"
#include "sizer/call_log.h"
#include "sizer/gradient_sketch.h"

namespace brimful::detail {
namespace {
constexpr double kUnlike = std::numeric_limits<double>::infinity();
constexpr double kTf32 = 5e-3;  // CUDA's matrices and convolutions may be rounded so
constexpr double kRoundings = 4;
constexpr double kNothing = 1e-6;  // of the pieces: a whole that is smaller cancels

using Sketched = std::array<double, kProjections>;

/// Hooks that project gradients as they come, and let them go: what is captured in their place has no memory.
class Hooks {
 public:
  Hooks(const std::vector<at::Tensor>& parameters, GradientSketch& sketch)
      : parameters_(parameters) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      hooks_.push_back(parameters_[i].register_hook([&sketch, i](const at::Tensor& gradient) {
        sketch.add(static_cast<int64_t>(i), gradient);
        return at::zeros({}, gradient.options().layout(at::kStrided)).expand(gradient.sizes());
      }));
    }
  }
  ~Hooks() {
    for (size_t i = 0; i < hooks_.size(); ++i) {
      parameters_[i].remove_hook(hooks_[i]);
    }
  }
  Hooks(const Hooks&) = delete;
  Hooks& operator=(const Hooks&) = delete;

 private:
  const std::vector<at::Tensor>& parameters_;
  std::vector<unsigned> hooks_;
};

struct Ran {
  Sketched values{};
  double epsilon = 0;
};

double norm(const Sketched& values) {
  double sum = 0;
  for (const auto value : values) {
    sum += value * value;
  }
  return std::sqrt(sum);
}

Sketched plus(const Sketched& a, const Sketched& b, double times) {
  Sketched sum = a;
  if (times != 0) {  // else a mean over nothing, which is NaN, counts nothing
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] += times * b[i];
    }
  }
  return sum;
}

Ran run(int64_t begin, int64_t end, const std::vector<at::Tensor>& parameters,
        const VerifyWork& work, const TrialPlan& plan) {
  Ran ran;
  const at::AutoGradMode grad_mode(plan.gradients);
  const auto piece = work.forward(begin, end);
  ran.epsilon = epsilon_of(piece.loss.scalar_type());
  if (!plan.gradients) {
    TORCH_CHECK_VALUE(piece.loss.numel() == 1,
                      "the loss must be a scalar (shape: ", piece.loss.sizes(), ")");
    ran.values[0] = piece.loss.item<double>();
    return ran;
  }
  require_loss(piece);
  GradientSketch sketch;
  {
    const Hooks hooks(parameters, sketch);
    const auto seed =
        at::full_like(piece.loss, plan.seed, at::TensorOptions().requires_grad(false));
    work.gradients(piece.loss, seed, parameters);
  }
  ran.values = sketch.values();
  return ran;
}

double relative(const Sketched& difference, double size) {
  const auto distance = norm(difference);
  return distance == 0 ? 0 : std::isfinite(distance) ? distance / size : kUnlike;
}
}  // namespace

LossTrial try_loss(const std::vector<at::Tensor>& parameters, Transaction& transaction,
                   const VerifyWork& work, const TrialPlan& plan) {
  const auto [begin, cut, end] = plan.window;
  LossTrial trial;
  Ran whole;
  Ran again;
  Ran first;
  Ran second;
  KeptBatch batch;
  transaction.capture();
  if (work.tensors) {
    batch.begin(work.tensors(begin, end), KeptBatch::Copies::all);
  }
  const auto run_rows = [&](int64_t from, int64_t to) {
    const auto ran = run(from, to, parameters, work, plan);
    transaction.restore();
    batch.restore();
    return ran;
  };
  const auto error = thrown_by([&, begin = begin, cut = cut, end = end] {
    whole = run_rows(begin, end);
    again = plan.repeats ? run_rows(begin, end) : whole;
    first = run_rows(begin, cut);
    second = run_rows(cut, end);
  });
  if (error) {
    transaction.restore();
    batch.restore();
    std::rethrow_exception(error);
  }
  double epsilon = std::max(plan.coarsest_epsilon ? plan.coarsest_epsilon() : 0, whole.epsilon);
  bool on_cuda = false;
  for (const auto& parameter : parameters) {
    epsilon = std::max(epsilon, epsilon_of(parameter.scalar_type()));
    on_cuda = on_cuda || parameter.is_cuda();
  }
  trial.floor = std::max(kRoundings * epsilon, on_cuda ? kTf32 : 0);
  trial.tolerance = std::max(std::sqrt(epsilon), trial.floor);
  const auto size = norm(whole.values);
  const auto of_pieces = std::max(norm(first.values), norm(second.values));
  trial.comparable =
      std::isfinite(size) && size > kNothing * (std::isfinite(of_pieces) ? of_pieces : 0);
  trial.repeat_distance = relative(plus(again.values, whole.values, -1), size);
  for (const auto& [of_first, of_second] : plan.weights) {
    const auto sum =
        plus(plus(plus({}, first.values, of_first), second.values, of_second), whole.values, -1);
    trial.distances.push_back(std::isnan(of_first) || std::isnan(of_second) ? kUnlike
                                                                            : relative(sum, size));
  }
  return trial;
}

}  // namespace brimful::detail
