#include <brimful/sizer/optimizer_bytes.h>
#include <brimful/step/distinct_tensors.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <optional>

namespace brimful {
namespace {
namespace optim = torch::optim;

/// In tensors of a parameter's size, as the optimizers' step() has them.
struct Need {
  int64_t state = 0;
  int64_t meanwhile = 0;
};

std::optional<Need> need_of(const optim::OptimizerOptions& options) {
  constexpr int64_t kDenominator = 2;  // a root, and the same divided
  if (const auto* adam = dynamic_cast<const optim::AdamOptions*>(&options)) {
    return Need{adam->amsgrad() ? 3 : 2, kDenominator + (adam->weight_decay() != 0)};
  }
  if (const auto* adamw = dynamic_cast<const optim::AdamWOptions*>(&options)) {
    return Need{adamw->amsgrad() ? 3 : 2, kDenominator};
  }
  if (const auto* sgd = dynamic_cast<const optim::SGDOptions*>(&options)) {
    return Need{sgd->momentum() != 0, (sgd->weight_decay() != 0) + sgd->nesterov()};
  }
  if (const auto* rmsprop = dynamic_cast<const optim::RMSpropOptions*>(&options)) {
    return Need{1 + (rmsprop->momentum() > 0) + rmsprop->centered(),
                1 + (rmsprop->weight_decay() != 0)};
  }
  if (const auto* adagrad = dynamic_cast<const optim::AdagradOptions*>(&options)) {
    return Need{1, 1 + (adagrad->weight_decay() != 0)};  // its state is made by the constructor
  }
  return std::nullopt;
}
}  // namespace

int64_t next_step_bytes(const optim::Optimizer& optimizer) {
  int64_t kept = 0;
  int64_t meanwhile = 0;
  for (const auto& group : optimizer.param_groups()) {
    const auto need = need_of(group.options());
    if (!need) {
      return 0;
    }
    for (const auto& parameter : distinct_tensors(group.params())) {
      if (!parameter.requires_grad()) {
        continue;
      }
      const auto bytes = static_cast<int64_t>(parameter.nbytes());
      kept += parameter.grad().defined() ? 0 : bytes;
      const bool is_new = optimizer.state().count(parameter.unsafeGetTensorImpl()) == 0;
      kept += is_new ? need->state * bytes : 0;
      meanwhile = std::max(meanwhile, need->meanwhile * bytes);
    }
  }
  return kept + meanwhile;
}

}  // namespace brimful
