// The loss of a step over pairs, once for all rows, and its gradients.
#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "sizer/pair_graph.h"
#include "sizer/pair_run.h"
#include "step/engine_queue.h"
#include "step/meet.h"

namespace brimful {
namespace {
constexpr double kStable = 1e-4;  // two evaluations: kernels may add in another order
constexpr double kStableInHalf = 1e-2;

bool is_in(const at::Tensor& tensor, const std::vector<at::Tensor>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [&](const auto& other) { return other.is_same(tensor); });
}
}  // namespace

at::Tensor PairRun::evaluate(const Towers& all) {
  const auto losses = work_.loss(all, meeting_.own(around_.group.rank()));
  TORCH_CHECK_TYPE(!losses.empty(), "pair_loss returned no tensor; return a scalar, or several");
  at::Tensor sum;
  values_.clear();
  for (const auto& loss : losses) {
    TORCH_CHECK_TYPE(loss.defined() && !loss.is_complex(),
                     "pair_loss returned no real tensor; return a scalar, or several");
    TORCH_CHECK_VALUE(loss.numel() == 1,
                      "the loss over pairs is not a scalar (shape: ", loss.sizes(),
                      "); return its mean or sum over the pairs");
    sum = sum.defined() ? sum + loss.reshape({}) : loss.reshape({});
    values_.push_back(loss.detach().reshape({}).clone());
  }
  return sum;
}

void PairRun::differentiate(const Towers& all) {
  Towers leaves;
  for (size_t i = 0; i < all.size(); ++i) {
    leaves.push_back(form_.towers[i].trains() ? all[i].detach().requires_grad_(true) : all[i]);
  }
  const auto since = at::sequence_number::peek();
  {
    const at::AutoGradMode with_graph(true);
    const auto loss = evaluate(leaves);
    TORCH_CHECK_VALUE(loss.requires_grad(),
                      "the loss over pairs does not depend on the embeddings (requires_grad: "
                      "false); compute it from what pair_loss is given");
    value_ = loss.detach().clone();
    beside_.parameters = parameters_of(loss, leaves, since);
    Towers inputs;
    for (size_t i = 0; i < leaves.size(); ++i) {
      if (form_.towers[i].trains()) {
        inputs.push_back(leaves[i]);
      }
    }
    inputs.insert(inputs.end(), beside_.parameters.begin(), beside_.parameters.end());
    const auto rows = static_cast<double>(all[0].size(0));
    const auto own = meeting_.own(around_.group.rank());
    const double weight = work_.options.own ? static_cast<double>(own.end - own.begin) / rows : 1;
    auto seed = at::full_like(value_, weight);
    if (scales()) {
      seed = around_.scaler->scale(seed);
    }
    auto gradients = run_backward_cleanly(around_.device, [&] {
      return work_.differentiate
                 ? work_.differentiate(loss, seed, inputs)
                 : torch::autograd::grad({loss}, inputs, {seed}, /*retain_graph=*/false,
                                         /*create_graph=*/false, /*allow_unused=*/true);
    });
    take_gradients(all, std::move(gradients));
  }
  if (around_.checks) {
    require_stable(all);
  }
}

/// Of what the loss has them for: of own rows, unless they are added up over the ranks first.
void PairRun::take_gradients(const Towers& all, std::vector<at::Tensor> gradients) {
  const at::NoGradGuard no_grad;
  const auto own = meeting_.own(around_.group.rank());
  size_t next = 0;
  bool any = false;
  for (size_t i = 0; i < all.size(); ++i) {
    auto seed = form_.towers[i].trains() ? std::move(gradients[next++]) : at::Tensor();
    any = any || seed.defined();
    if (seed.defined() && !shares_gradients() && around_.group.world_size() > 1) {
      seed = seed.narrow(0, own.begin, own.end - own.begin).clone();
    }
    seeds_.push_back(std::move(seed));
  }
  TORCH_CHECK_VALUE(any,
                    "the loss over pairs does not depend on the embeddings (gradients: none); "
                    "compute it from what pair_loss is given");
  beside_.gradients.assign(std::make_move_iterator(gradients.begin() + static_cast<int64_t>(next)),
                           std::make_move_iterator(gradients.end()));
  // Every rank has differentiated the same loss: the sum over them is to have it once.
  if (const auto ranks = meeting_.ranks_with_rows(); !work_.options.own && ranks > 1) {
    for (auto& gradient : beside_.gradients) {
      if (gradient.defined()) {
        gradient.div_(ranks);
      }
    }
  }
}

std::vector<at::Tensor> PairRun::parameters_of(const at::Tensor& loss, const Towers& all,
                                               uint64_t since) const {
  const auto reached = pairs::reached_by(loss, since);
  TORCH_CHECK_VALUE(!reached.older,
                    "the loss over pairs uses a tensor whose graph was made before it, and would "
                    "reach parameters past the embeddings; compute the loss from what pair_loss is "
                    "given, and detach what else it uses");
  const auto trained = brimful::parameters_of(around_.group);
  std::vector<at::Tensor> beside;
  for (const auto& leaf : reached.leaves) {
    if (is_in(leaf, all)) {
      continue;
    }
    TORCH_CHECK_VALUE(
        is_in(leaf, trained),
        "the loss over pairs has a gradient for a tensor that the sizer does not know "
        "(shape: ",
        leaf.sizes(), "); make it a parameter of the model that the sizer was given, or detach it");
    beside.push_back(leaf);
  }
  return beside;
}

void PairRun::require_stable(const Towers& all) const {
  const at::NoGradGuard no_grad;
  double again = 0;
  for (const auto& loss : work_.loss(all, meeting_.own(around_.group.rank()))) {
    again += loss.item<double>();
  }
  const auto first = value_.item<double>();
  const auto size = std::max(std::abs(first), std::abs(again));
  TORCH_CHECK_VALUE(
      !(std::abs(first - again) > (form_.is_half() ? kStableInHalf : kStable) * size),
      "the loss over pairs has another value for the same embeddings (first: ", first,
      ", then: ", again,
      "); make it a function of the embeddings alone: no random numbers, no state between calls");
}

}  // namespace brimful
