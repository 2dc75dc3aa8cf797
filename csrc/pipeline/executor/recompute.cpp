#include "pipeline/executor/recompute.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/ladder/checkpoint_call.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace brimful::pipeline {
namespace {
constexpr double kTolerance = 1e-3;  // on CUDA kernels may add up in another order

thread_local bool again = false;

class Again {
 public:
  Again() { again = true; }
  ~Again() { again = false; }
  Again(const Again&) = delete;
  Again& operator=(const Again&) = delete;
};

/// Sum and norm of each floating tensor.
using Fingerprint = std::vector<std::pair<double, double>>;

Fingerprint fingerprint_of(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  Fingerprint found;
  for (const auto& tensor : tensors) {
    if (tensor.defined() && tensor.is_floating_point() && tensor.layout() == at::kStrided) {
      found.emplace_back(tensor.sum().item<double>(),
                         at::linalg_vector_norm(tensor).item<double>());
    }
  }
  return found;
}

bool is_same(double left, double right, bool exact) {
  const double largest = std::max(std::abs(left), std::abs(right));
  return left == right || (std::isnan(left) && std::isnan(right)) ||
         (!exact && std::abs(left - right) <= kTolerance * largest);
}

bool are_same(const Fingerprint& first, const std::vector<at::Tensor>& outputs) {
  const auto second = fingerprint_of(outputs);
  const bool exact = outputs.empty() || !outputs[0].defined() || outputs[0].is_cpu();
  bool same = first.size() == second.size();
  for (size_t i = 0; same && i < first.size(); ++i) {
    same = is_same(first[i].first, second[i].first, exact) &&
           is_same(first[i].second, second[i].second, exact);
  }
  return same;
}
}  // namespace

bool runs_again() {
  return again;
}

Value forward_recomputed(const Stage& stage, const Value& input, SecondRun second) {
  Value output;
  const auto fingerprint = std::make_shared<Fingerprint>();
  brimful::detail::CheckpointCall call;
  call.inputs = input.tensors;
  call.named = [] { return std::vector<std::pair<std::string, at::Tensor>>(); };
  call.first = [&] {
    output = stage.forward(input);
    if (second.compared) {
      *fingerprint = fingerprint_of(output.tensors);
    }
    return output.tensors;
  };
  call.again = [&forward = stage.forward, input, second, fingerprint] {
    const Again scope;
    const auto keywords = second.scope();
    auto tensors = forward(input).tensors;
    if (second.compared) {
      second.compared(are_same(*fingerprint, tensors));
    }
    return tensors;
  };
  auto tensors = brimful::detail::run_checkpoint(std::move(call), {});
  output.tensors = std::move(tensors);
  return output;
}

}  // namespace brimful::pipeline
