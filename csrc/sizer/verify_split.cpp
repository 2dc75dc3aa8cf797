#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/sizer/verify_split.h>
#include <brimful/step/oom.h>
#include <brimful/step/pieces.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>

#include "base/thrown_by.h"
#include "sizer/call_log.h"
#include "sizer/compare.h"
#include "step/engine_queue.h"

namespace brimful::detail {
namespace {
constexpr double kShareThatCounts = 0.01;  // of the largest gradient

/// A loss and its gradients, weighted means over the rows that were added.
class Sums {
 public:
  explicit Sums(std::vector<at::Tensor> inputs)
      : inputs_(std::move(inputs)), gradients_(inputs_.size()) {}

  void add(const PieceLoss& piece, const VerifyWork& work) {
    loss_dtype_ = piece.loss.scalar_type();
    largest_loss_ = std::max(largest_loss_, std::abs(piece.loss.item<double>()));
    if (piece.weight == 0) {
      return;
    }
    weight_ += piece.weight;
    loss_ += piece.weight * piece.loss.item<double>();
    const auto seed =
        at::full_like(piece.loss, piece.weight, at::TensorOptions().requires_grad(false));
    const auto more = work.gradients(piece.loss, seed, inputs_);
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < more.size(); ++i) {
      if (more[i].defined()) {
        const auto part = more[i].to_dense();
        gradients_[i] = gradients_[i].defined() ? gradients_[i] + part : part.clone();
      }
    }
  }

  void finish() {
    TORCH_CHECK_VALUE(weight_ > 0, "the weights of the batch sum to 0 (weight: ", weight_,
                      "); there is no loss to compare");
    const at::NoGradGuard no_grad;
    loss_ /= weight_;
    for (size_t i = 0; i < gradients_.size(); ++i) {
      gradients_[i] =
          gradients_[i].defined() ? gradients_[i] / weight_ : at::zeros_like(inputs_[i]);
    }
  }

  double loss() const { return loss_; }
  double largest_loss() const { return largest_loss_; }
  c10::ScalarType loss_dtype() const { return loss_dtype_; }
  const std::vector<at::Tensor>& gradients() const { return gradients_; }

 private:
  std::vector<at::Tensor> inputs_;
  std::vector<at::Tensor> gradients_;
  double weight_ = 0;
  double loss_ = 0;
  double largest_loss_ = 0;
  c10::ScalarType loss_dtype_ = at::kFloat;
};

void run(Sums& sums, int64_t begin, int64_t end, const VerifyWork& work, CallLog* log) {
  if (log != nullptr) {
    log->begin_run({begin, end});
  }
  const auto piece = with_known_weight(work.forward(begin, end));
  if (log != nullptr) {
    log->end_forward();
  }
  require_loss(piece);
  sums.add(piece, work);
}

at::Tensor generator_state(c10::Device device) {
  auto generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

std::vector<at::Tensor> generator_states(c10::Device device) {
  std::vector<at::Tensor> states{generator_state(c10::Device(c10::DeviceType::CPU))};
  if (!device.is_cpu()) {
    states.push_back(generator_state(device));
  }
  return states;
}

double loss_difference(const Sums& whole, const Sums& split) {
  if (whole.loss() == split.loss() || (std::isnan(whole.loss()) && std::isnan(split.loss()))) {
    return 0;
  }
  const auto difference = std::abs(whole.loss() - split.loss());
  return std::isnan(difference) ? std::numeric_limits<double>::infinity()
                                : difference / std::max(whole.largest_loss(), split.largest_loss());
}

void compare_gradients(const Sums& whole, const Sums& split, const std::vector<std::string>& names,
                       SplitCheck& check) {
  double largest = 0;
  for (const auto& gradient : whole.gradients()) {
    largest = std::max(largest, largest_value(gradient));
  }
  for (size_t i = 0; i < names.size(); ++i) {
    const auto difference = largest_difference(whole.gradients()[i], split.gradients()[i]);
    const auto size = std::max({largest_value(whole.gradients()[i]), kShareThatCounts * largest,
                                std::numeric_limits<double>::min()});
    if (difference / size > check.gradient_difference) {
      check.gradient_difference = difference / size;
      check.worst_parameter = names[i];
    }
  }
}

/// Both runs, each from the same buffers and random numbers. Returns whether the first one drew random numbers.
bool run_both(Sums& whole, Sums& split, int64_t rows, const VerifyWork& work,
              const VerifyOptions& options, Transaction& transaction, KeptBatch& batch,
              CallLog* log) {
  const auto before = generator_states(options.device);
  run(whole, 0, rows, work, log);
  const auto after = generator_states(options.device);
  transaction.restore();
  batch.restore();
  int64_t begin = 0;
  for (const auto count : split_rows(rows, options.pieces)) {
    run(split, begin, begin + count, work, log);
    begin += count;
  }
  whole.finish();
  split.finish();
  return !std::equal(before.begin(), before.end(), after.begin(),
                     [](const auto& a, const auto& b) { return at::equal(a, b); });
}
}  // namespace

std::vector<at::Tensor> gradients_of(const at::Tensor& loss, const at::Tensor& seed,
                                     const std::vector<at::Tensor>& inputs) {
  return run_backward_cleanly(loss.device(), [&] {
    return torch::autograd::grad({loss}, inputs, {seed}, std::nullopt, false, true);
  });
}

SplitCheck verify_split(int64_t rows, const NamedTensors& parameters, Transaction& transaction,
                        const VerifyWork& work, const VerifyOptions& options, CallLog* log) {
  TORCH_CHECK_VALUE(options.pieces >= 2,
                    "a split has at least two pieces (pieces: ", options.pieces, ")");
  TORCH_CHECK_VALUE(rows >= options.pieces, "the batch has fewer rows than pieces (rows: ", rows,
                    ", pieces: ", options.pieces, "); pass more rows");
  TORCH_CHECK_VALUE(!options.rtol || *options.rtol >= 0,
                    "rtol must not be negative (rtol: ", options.rtol.value_or(0), ")");
  std::vector<std::string> names;
  std::vector<at::Tensor> inputs;
  double epsilon = 0;
  for (const auto& [name, parameter] : parameters) {
    if (parameter.requires_grad()) {
      names.push_back(name);
      inputs.push_back(parameter);
      epsilon = std::max(epsilon, epsilon_of(parameter.scalar_type()));
    }
  }
  TORCH_CHECK_VALUE(!inputs.empty(),
                    "the model has no parameter that needs a gradient (parameters: ",
                    parameters.size(), "); there is nothing to compare");
  const at::AutoGradMode grad_mode(true);
  Sums whole(inputs);
  Sums split(inputs);
  SplitCheck check;
  KeptBatch batch;
  transaction.capture();
  if (work.tensors) {
    batch.begin(work.tensors(0, rows), KeptBatch::Copies::all);
  }
  const auto error = thrown_by([&] {
    check.drew_random = run_both(whole, split, rows, work, options, transaction, batch, log);
  });
  if (error) {
    is_out_of_memory(error);  // read at once: operators fail while an error of Python is set
  }
  transaction.restore();
  batch.restore();
  if (error) {
    std::rethrow_exception(error);
  }
  epsilon = std::max(epsilon, epsilon_of(whole.loss_dtype()));
  epsilon = std::max(epsilon, log != nullptr ? log->coarsest_epsilon() : 0);
  check.rtol = options.rtol.value_or(std::sqrt(epsilon));
  check.loss_difference = loss_difference(whole, split);
  compare_gradients(whole, split, names, check);
  check.equal = check.loss_difference <= check.rtol && check.gradient_difference <= check.rtol;
  if (log != nullptr) {
    check.random = log->random();
    check.coupled = check.equal ? std::vector<std::string>{} : log->coupled(check.rtol);
    check.loss_coupled =
        !check.equal && check.coupled.empty() && (!log->lost_random() || log->places_in_loss());
  }
  return check;
}

}  // namespace brimful::detail
