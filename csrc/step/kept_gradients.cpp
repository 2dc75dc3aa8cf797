#include "step/kept_gradients.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/error.h>
#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>

#include <optional>

#include "base/format.h"
#include "memory/tensor_bytes.h"

namespace brimful {
namespace {
at::Tensor apart(const at::Tensor& gradient) {
  if (gradient.layout() != at::kStrided || gradient.storage().use_count() == 1) {
    return gradient;
  }
  const at::AutoGradMode with_history(gradient.requires_grad());
  return gradient.clone();
}
}  // namespace

void KeptGradients::take(const std::vector<at::Tensor>& parameters) {
  std::optional<memory::Unlimited> unlimited;
  std::string refused;
  for (const auto& parameter : parameters) {
    auto& gradient = parameter.mutable_grad();
    if (!gradient.defined()) {
      continue;
    }
    at::Tensor kept;
    try {
      kept = apart(gradient);
    } catch (...) {
      if (unlimited || !is_out_of_memory(std::current_exception())) {
        throw;
      }
      refused = to_string(std::current_exception());
    }
    if (!kept.defined()) {
      unlimited.emplace();
      kept = apart(gradient);
    }
    bytes_ += memory::bytes_of(kept);
    kept_.emplace_back(parameter, std::move(kept));
    gradient.reset();
  }
  if (!refused.empty()) {
    throw BatchTooLarge(
        "memory ran out for the copy of the gradients that a step adds to (accumulate: true, "
        "gradients: " +
        format_bytes(bytes_) +
        "); give the device more memory, or pass one larger batch to a step without accumulate. "
        "The error was: " +
        refused);
  }
}

void KeptGradients::add() {
  const at::NoGradGuard no_grad;
  const memory::Unlimited unlimited;  // all ranks have accepted: no way back
  for (auto& [parameter, kept] : kept_) {
    auto& gradient = parameter.mutable_grad();
    if (!gradient.defined()) {
      gradient = std::move(kept);
    } else if (gradient.requires_grad() || kept.requires_grad()) {
      const at::AutoGradMode with_history(true);
      gradient = gradient + kept;
    } else if (gradient.layout() == at::kStrided) {
      gradient.add_(kept);
    } else {
      const auto sum = kept + gradient;
      gradient =
          sum.layout() == at::kSparse ? sum.coalesce() : sum;  // a row once, as norms need it
    }
  }
  kept_.clear();
  bytes_ = 0;
}

void KeptGradients::give_back() {
  for (auto& [parameter, kept] : kept_) {
    parameter.mutable_grad() = std::move(kept);
  }
  kept_.clear();
  bytes_ = 0;
}

}  // namespace brimful
