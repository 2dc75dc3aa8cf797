// How a gradient gets into its bucket, moved into the flat buffer, or, if it is large, left where it lies; and how the sum
// becomes the gradient.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "reducer/gradient_view.h"
#include "reducer/place.h"

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

void Placement::begin_backward() {
  seen_.resize(layout_.parameters.size(), -1);
  used_.resize(layout_.parameters.size(), 0);
  ++generation_;
  copies_.flush_all();
  copies_.forget();
  for (auto& bucket : layout_.buckets) {
    bucket.pending = static_cast<int64_t>(bucket.parameters.size());
    bucket.stream.reset();
  }
}

bool Placement::place_next(int64_t parameter, const at::Tensor& arrived) {
  seen_[parameter] = generation_;
  place(parameter, arrived);
  const auto index = layout_.slots[parameter].bucket;
  auto& bucket = layout_.buckets[index];
  if (bucket.pending == 1) {
    copies_.flush(index);
  }
  return --bucket.pending == 0;
}

double Placement::scale_into(const Bucket& bucket, int64_t index) const {
  return bucket.wire || hooks_.takes(layout_, index) ? 1.0 : scales_.gradients;
}

void Placement::place(int64_t parameter, const at::Tensor& arrived) {
  const at::NoGradGuard no_grad;
  auto& gradient = layout_.parameters[parameter].mutable_grad();
  const auto& slot = layout_.slots[parameter];
  auto& bucket = layout_.buckets[slot.bucket];
  if (gradient.defined() && gradient.requires_grad()) {
    watch_(gradient);  // a loss of it reaches the parameters too
  }
  if (bucket.direct) {
    place_direct(parameter, arrived);
    return;
  }
  if (!gradient.defined()) {
    used_[parameter] = 0;
    if (slot.view.defined()) {
      layout_.views[parameter].let_go();
      set_zero(slot.view);
    } else {
      bucket.own.reset();
    }
    return;
  }
  layout_.require_unchanged(parameter, gradient);
  used_[parameter] = 1;
  const double scale = scale_into(bucket, slot.bucket);
  if (!slot.view.defined()) {
    if (attempt_.is_last_backward()) {
      bucket.own = sparse_scaled(gradient, scales_.sparse);
    }
  } else {
    place_flat(parameter, scale);
  }
}

void Placement::place_flat(int64_t parameter, double scale) {
  auto& gradient = layout_.parameters[parameter].mutable_grad();
  const auto& view = layout_.slots[parameter].view;
  if (is_alias(gradient, view)) {
    if (scale != 1 && !copies_.hold(parameter, scale)) {
      view.mul_(scale);
    }
    return;
  }
  layout_.views[parameter].let_go();
  if (gradient.requires_grad()) {
    copy_scaled(view, gradient, scale);
    if (attempt_.is_last_backward()) {
      with_history_.push_back(parameter);
    }
  } else if (!copies_.hold(parameter, scale)) {
    copy_scaled(view, gradient, scale);
    gradient = layout_.views[parameter].over(view);
  }
}

void Placement::place_direct(int64_t parameter, const at::Tensor& arrived) {
  const auto& owner = layout_.parameters[parameter];
  auto& gradient = owner.mutable_grad();
  const auto index = layout_.slots[parameter].bucket;
  auto& bucket = layout_.buckets[index];
  if (!gradient.defined()) {
    used_[parameter] = 0;
    return;
  }
  layout_.require_unchanged(parameter, gradient);
  used_[parameter] = 1;
  const bool as_it_is =
      gradient.layout() == at::kStrided && gradient.strides() == owner.strides() &&
      gradient.scalar_type() == owner.scalar_type() && gradient.device() == owner.device() &&
      !gradient.is_conj() && !gradient.is_neg() && is_sole_owner(gradient, arrived);
  const double scale = scale_into(bucket, index);
  const bool has_history = gradient.requires_grad();
  if (has_history && attempt_.is_last_backward()) {
    bucket.own = at::empty_like(owner.detach());
    copy_scaled(bucket.own, gradient, scale);
    with_history_.push_back(parameter);
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
  if (scale != 1) {
    gradient.mul_(scale);
  }
  if (attempt_.launches()) {
    bucket.own = gradient;
  }
}

void Placement::add_again(int64_t parameter, const at::Tensor& gradient) {
  const auto& slot = layout_.slots[parameter];
  auto& bucket = layout_.buckets[slot.bucket];
  if (!gradient.defined()) {
    return;
  }
  const at::NoGradGuard no_grad;
  if (bucket.sparse()) {
    place(parameter, gradient);
    return;
  }
  if (copies_.holds(parameter)) {
    return;  // autograd has added it to what will be copied
  }
  copies_.flush(slot.bucket);
  auto& sum = layout_.parameters[parameter].mutable_grad();
  const auto& placed = bucket.direct ? bucket.own : slot.view;
  const double scale = scale_into(bucket, slot.bucket);
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
    sum = bucket.direct ? placed : layout_.views[parameter].over(placed);
  }
}

bool Placement::fill(int64_t index) {
  auto& bucket = layout_.buckets[index];
  bucket.join_current_stream();
  for (const auto parameter : bucket.parameters) {
    if (!has_come(parameter)) {
      place(parameter, {});
    }
  }
  copies_.flush(index);
  return bucket.pending > 0;
}

void Placement::take_sums(double scale, double carry, bool keep_unused) {
  for (auto& bucket : layout_.buckets) {
    if (bucket.sparse()) {
      continue;
    }
    const auto row = layout_.row_of(bucket);
    if (bucket.wire) {
      bucket.wire->decode(row, scale, carry);
      continue;
    }
    if (bucket.hook_result.defined() && !bucket.hook_result.is_alias_of(row)) {
      row.copy_(bucket.hook_result.reshape({-1}));
    }
    const double factor = bucket.hook_result.defined() ? scale * scales_.hook : scale;
    if (factor != 1) {
      row.mul_(factor);
    }
  }
  for (size_t i = 0; i < layout_.parameters.size(); ++i) {
    take_sum(i, scale, keep_unused);
  }
  for (const auto i : with_history_) {
    const auto& slot = layout_.slots[i];
    auto& gradient = layout_.parameters[i].mutable_grad();
    gradient = with_history_of(slot.view.defined() ? slot.view : layout_.buckets[slot.bucket].own,
                               gradient);
  }
}

void Placement::take_sum(size_t parameter, double scale, bool keep_unused) {
  const auto& slot = layout_.slots[parameter];
  const auto& bucket = layout_.buckets[slot.bucket];
  if (!bucket.sparse() && used_[parameter] != 0) {
    return;  // its gradient has been the view, or what was sent, since place()
  }
  auto& gradient = layout_.parameters[parameter].mutable_grad();
  if (keep_unused && !layout_.tail->head().is_used(static_cast<int64_t>(parameter))) {
    gradient.reset();
  } else if (!bucket.sparse()) {
    gradient = bucket.direct ? bucket.own : layout_.views[parameter].over(slot.view);
  } else {
    gradient = bucket.own;
    if (scale != 1) {
      gradient._values().mul_(scale);
    }
  }
}

void Placement::discard() {
  for (const auto& parameter : layout_.parameters) {
    parameter.mutable_grad().reset();
  }
  forget();
}

void Placement::forget() {
  with_history_.clear();
  copies_.forget();
  for (auto& bucket : layout_.buckets) {
    bucket.own.reset();
    bucket.hook_result.reset();
  }
  std::fill(used_.begin(), used_.end(), uint8_t{0});
}

}  // namespace brimful
