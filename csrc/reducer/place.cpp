// How a gradient gets into its bucket: moved into the flat buffer, or, if it is large, left where it lies.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "reducer/engine.h"

namespace brimful {
namespace {
/// Nothing else sees the gradient's memory. Autograd makes it from what arrived, which lives until the hook ends, and
/// which may be a view of a tensor that only the view holds (the transpose of a product).
bool is_sole_owner(const at::Tensor& gradient, const at::Tensor& arrived) {
  size_t owners = 1;
  if (arrived.defined() && !arrived.is_same(gradient) && arrived.is_alias_of(gradient)) {
    ++owners;
    if (arrived.is_view()) {
      const auto& base = arrived._base();
      const bool held_twice = gradient.is_view() && gradient._base().is_same(base);
      if (base.use_count() > (held_twice ? 2 : 1)) {
        return false;
      }
      ++owners;
    }
  }
  return gradient.storage().use_count() == owners;
}
}  // namespace

void Engine::place(int64_t parameter, const at::Tensor& arrived) {
  const at::NoGradGuard no_grad;
  auto& gradient = s_.layout.parameters[parameter].mutable_grad();
  const auto& slot = s_.layout.slots[parameter];
  auto& bucket = s_.layout.buckets[slot.bucket];
  if (gradient.defined() && gradient.requires_grad()) {
    driver_->watch_gradient(gradient);  // a loss of it reaches the parameters too
  }
  if (bucket.direct) {
    place_direct(parameter, arrived);
    return;
  }
  if (!gradient.defined()) {
    s_.attempt.used[parameter] = 0;
    if (slot.view.defined()) {
      s_.layout.views[parameter].let_go();
      set_zero(slot.view);
    } else {
      bucket.own.reset();
    }
    return;
  }
  s_.layout.require_unchanged(parameter, gradient);
  s_.attempt.used[parameter] = 1;
  const double scale =
      bucket.wire || s_.hooks.takes(s_.layout, slot.bucket) ? 1.0 : s_.attempt.scales.gradients;
  if (!slot.view.defined()) {
    if (s_.attempt.launching || s_.attempt.completing) {
      bucket.own = sparse_scaled(gradient, s_.attempt.scales.sparse);
    }
  } else if (!is_alias(gradient, slot.view)) {
    s_.layout.views[parameter].let_go();
    copy_scaled(slot.view, gradient, scale);
    if (!gradient.requires_grad()) {
      gradient = s_.layout.views[parameter].over(slot.view);
    } else if (s_.attempt.launching || s_.attempt.completing) {
      s_.attempt.with_history.push_back(parameter);
    }
  } else if (scale != 1) {
    slot.view.mul_(scale);
  }
}

void Engine::place_direct(int64_t parameter, const at::Tensor& arrived) {
  const auto& owner = s_.layout.parameters[parameter];
  auto& gradient = owner.mutable_grad();
  const auto index = s_.layout.slots[parameter].bucket;
  auto& bucket = s_.layout.buckets[index];
  if (!gradient.defined()) {
    s_.attempt.used[parameter] = 0;
    return;
  }
  s_.layout.require_unchanged(parameter, gradient);
  s_.attempt.used[parameter] = 1;
  const bool as_it_is =
      gradient.layout() == at::kStrided && gradient.strides() == owner.strides() &&
      gradient.scalar_type() == owner.scalar_type() && gradient.device() == owner.device() &&
      !gradient.is_conj() && !gradient.is_neg() && is_sole_owner(gradient, arrived);
  const bool has_history = gradient.requires_grad();
  if (has_history && (s_.attempt.launching || s_.attempt.completing)) {
    bucket.own = at::empty_like(owner.detach());
    const bool as_gradient = bucket.wire || s_.hooks.takes(s_.layout, index);
    copy_scaled(bucket.own, gradient, as_gradient ? 1.0 : s_.attempt.scales.gradients);
    s_.attempt.with_history.push_back(parameter);
  }
  if (has_history) {
    return;
  }
  if (!as_it_is) {
    // In memory that something else sees too, or not in the parameter's layout.
    auto fresh = at::empty_like(owner);
    fresh.copy_(gradient);
    gradient = std::move(fresh);
  }
  if (!bucket.wire && !s_.hooks.takes(s_.layout, index) && s_.attempt.scales.gradients != 1) {
    gradient.mul_(s_.attempt.scales.gradients);
  }
  if (s_.attempt.launching) {
    bucket.own = gradient;
  }
}

void Engine::add_again(int64_t parameter, const at::Tensor& gradient) {
  const auto& slot = s_.layout.slots[parameter];
  auto& bucket = s_.layout.buckets[slot.bucket];
  if (!gradient.defined()) {
    return;
  }
  const at::NoGradGuard no_grad;
  if (bucket.sparse()) {
    place(parameter, gradient);
    return;
  }
  auto& sum = s_.layout.parameters[parameter].mutable_grad();
  const auto& placed = bucket.direct ? bucket.own : slot.view;
  const double scale =
      bucket.wire || s_.hooks.takes(s_.layout, slot.bucket) ? 1.0 : s_.attempt.scales.gradients;
  if (!placed.defined()) {
    place(parameter, gradient);
  } else if (is_alias(sum, placed)) {
    if (scale != 1) {
      placed.add_(gradient, scale - 1);  // autograd has added it as it is to what was scaled
    }
  } else if (sum.requires_grad()) {
    copy_scaled(placed, sum, scale);  // it keeps its graph
  } else {
    placed.add_(gradient, scale);  // autograd has made a new sum beside what was placed
    sum = bucket.direct ? placed : s_.layout.views[parameter].over(placed);
  }
}

void Engine::fill(int64_t index) {
  for (const auto parameter : s_.layout.buckets[index].parameters) {
    if (s_.attempt.seen[parameter] != s_.attempt.generation) {
      place(parameter, {});
    }
  }
  if (s_.layout.buckets[index].pending > 0) {
    s_.watch.ready(index);
  }
}

}  // namespace brimful
