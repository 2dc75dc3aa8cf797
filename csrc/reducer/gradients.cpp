// What can be done with all gradients at once, bucket by bucket.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <limits>

#include "reducer/reducer_state.h"

namespace brimful {
namespace {
/// The gradients there are, in as few rows as possible: a flat bucket is one row if all of its gradients lie in it.
template <typename Visit>
void for_each_row(const std::vector<at::Tensor>& parameters, const std::vector<Slot>& slots,
                  const std::vector<Bucket>& buckets, const Visit& visit) {
  for (const auto& bucket : buckets) {
    const auto in_place = [&](int64_t i) { return is_alias(parameters[i].grad(), slots[i].view); };
    if (!bucket.parameters.empty() && bucket.gradients.defined() &&
        std::all_of(bucket.parameters.begin(), bucket.parameters.end(), in_place)) {
      visit(bucket.gradients, bucket.parameters);
      continue;
    }
    for (const auto i : bucket.parameters) {
      const auto& gradient = parameters[i].grad();
      if (gradient.defined()) {
        visit(gradient.layout() == at::kStrided ? gradient : gradient._values(),
              std::vector<int64_t>{i});
      }
    }
  }
}
}  // namespace

at::Tensor Reducer::clip_grad_norm(double max_norm, double norm_type) {
  const auto& layout = s_->engine.layout();
  const auto device = s_->engine.link().device;
  TORCH_CHECK_VALUE(max_norm > 0, "the norm's bound must be positive (max_norm: ", max_norm, ")");
  TORCH_CHECK_VALUE(norm_type > 0, "the norm's order must be positive (norm_type: ", norm_type,
                    "); use 2, or infinity");
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> norms;
  for_each_row(layout.parameters, layout.slots, layout.buckets,
               [&](const at::Tensor& row, const std::vector<int64_t>& /*members*/) {
                 if (row.numel() > 0) {
                   norms.push_back(at::linalg_vector_norm(row, norm_type).to(device));
                 }
               });
  if (norms.empty()) {
    return at::zeros({}, at::TensorOptions().device(device));
  }
  const auto dtype = norms.front().scalar_type();
  for (auto& norm : norms) {
    norm = norm.to(dtype);
  }
  auto total = at::linalg_vector_norm(at::stack(norms), norm_type);
  const auto factor = at::clamp_max(max_norm / (total + 1e-6), 1.0);  // as torch's clip_grad_norm_
  for_each_row(layout.parameters, layout.slots, layout.buckets,
               [&](const at::Tensor& row, const std::vector<int64_t>& /*members*/) {
                 row.mul_(factor.to(row.device()));
               });
  return total;
}

std::optional<int64_t> Reducer::nonfinite_gradient() const {
  const auto& layout = s_->engine.layout();
  const at::NoGradGuard no_grad;
  std::vector<int64_t> bad;
  for_each_row(layout.parameters, layout.slots, layout.buckets,
               [&](const at::Tensor& row, const std::vector<int64_t>& members) {
                 const auto all_finite = [](const at::Tensor& values) {
                   return at::isfinite(values).all().item<bool>();
                 };
                 if (all_finite(row)) {
                   return;
                 }
                 for (const auto i : members) {
                   const auto& gradient = layout.parameters[i].grad();
                   if (members.size() == 1 || !all_finite(gradient)) {
                     bad.push_back(i);
                   }
                 }
               });
  return bad.empty() ? std::nullopt : std::optional(*std::min_element(bad.begin(), bad.end()));
}

}  // namespace brimful
