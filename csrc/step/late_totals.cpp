#include "step/late_totals.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>

#include <cmath>
#include <string>
#include <utility>

#include "step/agreement.h"

namespace brimful {

void LateTotals::note(int64_t step, std::shared_ptr<const LateSums> sums, const at::Tensor& total,
                      const at::Tensor& doubtful) {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  last_ = {step, sums, at::where(total > 0, total, 1.0)};
  auto& pending = pending_.emplace_back(Pending{step, std::move(sums), std::nullopt});
  if (doubtful.defined()) {
    pending.doubtful.emplace(doubtful);
  }
}

Divisor LateTotals::ref_or(double known) const {
  // A mark of its own for each step; negative, as no weight is.
  return last_.sums ? Divisor{known, last_.ref, -1.0 - static_cast<double>(last_.step)}
                    : Divisor{known, {}, known};
}

std::optional<double> LateTotals::last() const {
  return last_.sums ? std::optional(last_.sums->weight()) : std::nullopt;
}

void LateTotals::check() {
  const auto has_come = [](const Pending& pending) {
    return pending.sums->take() && (!pending.doubtful || pending.doubtful->if_come() != nullptr);
  };
  while (!pending_.empty() && has_come(pending_.front())) {
    const auto come = std::move(pending_.front());
    pending_.pop_front();
    const auto name = "step " + std::to_string(come.step);
    const auto weight = come.sums->weight();
    if (!std::isfinite(weight) || weight <= 0) {
      forget_last();
      TORCH_CHECK_VALUE(
          false,
          nothing_counts(name, weight, "its gradient was made zero; a device had the weights"));
    }
    if (come.doubtful && *come.doubtful->if_come()->const_data_ptr<bool>()) {
      forget_last();
      TORCH_CHECK_VALUE(
          false, "the gradient of ", name,
          " was not finite, and one of its pieces had no weight and a loss that is not finite, "
          "as of a mean over nothing (weight: 0); load a checkpoint from before it, and return "
          "the weight as a number of Python (weight.item()), so that such a piece is left out, "
          "or divide by weight.clamp(min=1)");
    }
  }
}

}  // namespace brimful
