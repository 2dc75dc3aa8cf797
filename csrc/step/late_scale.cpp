#include "step/late_scale.h"

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
}  // namespace

at::Tensor scale_gradients(const StepGroup& group, const at::Tensor& scale) {
  const at::NoGradGuard no_grad;
  const memory::Unlimited unlimited;  // all ranks have accepted: no way back
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

}  // namespace brimful
