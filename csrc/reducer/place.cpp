// How a gradient gets into its bucket: moved into the flat buffer, or, if it is large, left where it lies.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/error.h>

#include "reducer/reducer_state.h"

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

// A gradient of another shape would be read past its end, or be broadcast without a word; another size on the wire than
// the other ranks' would end their processes (gloo).
void Reducer::State::require_unchanged(int64_t parameter, const at::Tensor& gradient) const {
  const auto& slot = slots[parameter];
  const auto& info = infos[parameter];
  const auto& now = parameters[parameter];
  const bool same_shape =
      slot.view.defined() ? gradient.sizes() == slot.view.sizes() : gradient.numel() == slot.numel;
  if (same_shape && now.scalar_type() == info.dtype && now.device() == info.device) [[likely]] {
    return;
  }
  throw PlanMismatch(
      c10::str("a parameter changed after its module was wrapped (parameter: ", name_of(parameter),
               ", wrapped with ", info.numel, " elements of ", info.dtype, " on ", info.device,
               ", now ", now.sizes(), " of ", now.scalar_type(), " on ", now.device(),
               "); wrap the module again, on all ranks"));
}

void Reducer::place(int64_t parameter, const at::Tensor& arrived) {
  auto& s = *s_;
  const at::NoGradGuard no_grad;
  auto& gradient = s.parameters[parameter].mutable_grad();
  const auto& slot = s.slots[parameter];
  auto& bucket = s.buckets[slot.bucket];
  if (gradient.defined() && gradient.requires_grad()) {
    begin_backward_at(gradient);  // a loss of it reaches the parameters too
  }
  if (bucket.direct) {
    place_direct(parameter, arrived);
    return;
  }
  if (!gradient.defined()) {
    s.used[parameter] = 0;
    if (slot.view.defined()) {
      s.views[parameter].let_go();
      set_zero(slot.view);
    } else {
      bucket.own.reset();
    }
    return;
  }
  s.require_unchanged(parameter, gradient);
  s.used[parameter] = 1;
  const double scale = bucket.wire || s.is_hooked(slot.bucket) ? 1.0 : s.scale;
  if (!slot.view.defined()) {
    if (s.launching || s.completing) {
      bucket.own = sparse_scaled(gradient, s.sparse_scale);
    }
  } else if (!is_alias(gradient, slot.view)) {
    s.views[parameter].let_go();
    copy_scaled(slot.view, gradient, scale);
    if (!gradient.requires_grad()) {
      gradient = s.views[parameter].over(slot.view);
    } else if (s.launching || s.completing) {
      s.with_history.push_back(parameter);
    }
  } else if (scale != 1) {
    slot.view.mul_(scale);
  }
}

void Reducer::place_direct(int64_t parameter, const at::Tensor& arrived) {
  auto& s = *s_;
  const auto& owner = s.parameters[parameter];
  auto& gradient = owner.mutable_grad();
  const auto index = s.slots[parameter].bucket;
  auto& bucket = s.buckets[index];
  if (!gradient.defined()) {
    s.used[parameter] = 0;
    return;
  }
  s.require_unchanged(parameter, gradient);
  s.used[parameter] = 1;
  const bool as_it_is =
      gradient.layout() == at::kStrided && gradient.strides() == owner.strides() &&
      gradient.scalar_type() == owner.scalar_type() && gradient.device() == owner.device() &&
      !gradient.is_conj() && !gradient.is_neg() && is_sole_owner(gradient, arrived);
  const bool has_history = gradient.requires_grad();
  if (has_history && (s.launching || s.completing)) {
    bucket.own = at::empty_like(owner.detach());
    const bool as_gradient = bucket.wire || s.is_hooked(index);
    copy_scaled(bucket.own, gradient, as_gradient ? 1.0 : s.scale);
    s.with_history.push_back(parameter);
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
  if (!bucket.wire && !s.is_hooked(index) && s.scale != 1) {
    gradient.mul_(s.scale);
  }
  if (s.launching) {
    bucket.own = gradient;
  }
}

void Reducer::add_again(int64_t parameter, const at::Tensor& gradient) {
  auto& s = *s_;
  const auto& slot = s.slots[parameter];
  auto& bucket = s.buckets[slot.bucket];
  if (!gradient.defined()) {
    return;
  }
  const at::NoGradGuard no_grad;
  if (bucket.sparse()) {
    place(parameter, gradient);
    return;
  }
  auto& sum = s.parameters[parameter].mutable_grad();
  const auto& placed = bucket.direct ? bucket.own : slot.view;
  const double scale = bucket.wire || s.is_hooked(slot.bucket) ? 1.0 : s.scale;
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
    sum = bucket.direct ? placed : s.views[parameter].over(placed);
  }
}

void Reducer::let_go_of_earlier(int64_t index) {
  auto& s = *s_;
  for (const auto parameter : s.buckets[index].parameters) {
    const auto& gradient = s.parameters[parameter].grad();
    if (gradient.defined() && is_alias(gradient, s.slots[parameter].view)) {
      continue;  // of this step
    }
    s.let_go_of(parameter);
  }
}

void Reducer::fill(int64_t index) {
  auto& s = *s_;
  for (const auto parameter : s.buckets[index].parameters) {
    if (s.seen[parameter] != s.generation) {
      place(parameter, {});
    }
  }
  if (s.buckets[index].pending > 0) {
    s.watch.ready(index);
  }
}

}  // namespace brimful
