#include "step/piece_sums.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>

#include <limits>

namespace brimful {
namespace {
at::Tensor plus(const at::Tensor& sum, const at::Tensor& more) {
  return sum.defined() ? sum + more : more;
}
}  // namespace

at::Tensor seed_of(const PieceLoss& piece, const Divisor& ref) {
  if (!piece.late_weight.defined() && !ref.late.defined()) {
    return at::full_like(piece.loss, piece.weight / ref.value,
                         at::TensorOptions().requires_grad(false));
  }
  const at::NoGradGuard no_grad;
  const auto divisor = ref.late.defined() ? ref.late : at::scalar_tensor(ref.value, at::kDouble);
  const auto share =
      piece.late_weight.defined() ? piece.late_weight / divisor : piece.weight / divisor;
  return share.to(piece.loss.options()).expand_as(piece.loss);
}

void PieceSums::add(const PieceLoss& piece) {
  const auto loss = piece.loss.detach().reshape({}).to(at::kDouble);
  if (!piece.late_weight.defined()) {
    losses_ = plus(losses_, loss * piece.weight);
    weight_ += piece.weight;
    return;
  }
  const at::NoGradGuard no_grad;
  const auto& weight = piece.late_weight;
  losses_ = plus(losses_, at::where(weight == 0, 0.0, loss * weight));
  // Of a negative one, NaN: the sum is none, and is refused.
  late_weight_ =
      plus(late_weight_, at::where(weight >= 0, weight, std::numeric_limits<double>::quiet_NaN()));
  const auto doubtful = at::logical_and(weight == 0, at::isfinite(loss).logical_not());
  doubtful_ = doubtful_.defined() ? doubtful_.logical_or(doubtful) : doubtful;
}

Announcement PieceSums::said_with(ControlRecord record) const {
  record.weight = late_weight_.defined() ? kLateWeight : weight_;
  return {record, losses_, late_weight_.defined() ? late_weight_ + weight_ : at::Tensor()};
}

}  // namespace brimful
