#include "step/accept_late.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>

#include <limits>
#include <vector>

#include "step/copy_each.h"
#include "step/each_parameter.h"

namespace brimful {
namespace {
std::vector<at::Tensor> values_of_gradients(const StepGroup& group) {
  std::vector<at::Tensor> values;
  for_each_parameter(group.participants(), group.outside(), [&](const at::Tensor& parameter) {
    const auto& gradient = parameter.grad();
    if (!gradient.defined() || gradient.numel() == 0) {
      return;
    }
    const auto own = gradient.is_sparse() ? gradient._values() : gradient;
    values.push_back(own.is_complex() ? at::view_as_real(own) : own);
  });
  return values;
}

/// Returns whether one of them is not finite (0-dim, bool).
at::Tensor scale_gradients(const StepGroup& group, const at::Tensor& scale) {
  const auto values = values_of_gradients(group);
  auto found = at::zeros({1}, scale.options().dtype(at::kFloat));
  const auto in_float = scale.to(at::kFloat).reshape({1});
  for_each_kind(values, [&](const std::vector<size_t>& places) {
    std::vector<at::Tensor> alike;
    alike.reserve(places.size());
    for (const auto i : places) {
      alike.push_back(values[i]);
    }
    if (alike[0].scalar_type() == at::kDouble) {
      at::_foreach_mul_(alike, scale);
      const auto largest =
          at::stack(at::_foreach_norm(alike, std::numeric_limits<double>::infinity()));
      found.logical_or_(at::isfinite(largest).logical_not().any().reshape({1}));
    } else {  // in float where they are shorter, as a scale of the host is
      at::_amp_foreach_non_finite_check_and_unscale_(alike, found, in_float);
    }
  });
  return found.reshape({}).to(at::kBool);
}
}  // namespace

void accept_late(StepEngine& engine, const AttemptResult& result, const Divisor& ref, bool checks) {
  const memory::Unlimited unlimited;  // all ranks have accepted: no way back
  const at::NoGradGuard no_grad;
  const bool is_late = has_late_weight(result.records);
  const auto& sums = engine.group().late_sums();
  const auto total =
      is_late ? sums->device_weight() : at::full_like(ref.late, total_weight(result.records));
  const auto divided_by = ref.late.defined() ? ref.late : at::full_like(total, ref.value);
  const bool counts = is_late || total_weight(result.records) > 0;
  engine.group().accept(1, /*keep_unused=*/counts);
  const auto infinite =
      scale_gradients(engine.group(), at::where(total > 0, divided_by / total, 0.0));
  if (!is_late) {
    if (counts) {
      engine.note_total(total_weight(result.records));
    }
    return;
  }
  const bool doubts = checks && result.doubtful.defined();
  engine.late_totals().note(engine.steps(), sums, total,
                            doubts ? result.doubtful.logical_and(infinite) : at::Tensor());
}

}  // namespace brimful
