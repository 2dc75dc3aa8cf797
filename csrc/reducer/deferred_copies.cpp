#include "reducer/deferred_copies.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "reducer/copy_list.h"

namespace brimful {
namespace {
/// Of a bucket, whose gradients they are.
void scale_views(const Bucket& bucket, const std::vector<at::Tensor>& views, double scale) {
  if (scale == 1 || views.empty()) {
    return;
  }
  if (views.size() == bucket.parameters.size()) {
    auto row = bucket.gradients;
    row.mul_(scale);
  } else {
    at::_foreach_mul_(views, scale);
  }
}

int64_t bytes_of_gradient(const at::Tensor& gradient) {
  return gradient.numel() * static_cast<int64_t>(gradient.element_size());
}
}  // namespace

bool DeferredCopies::hold(int64_t parameter, double scale) {
  const auto& slot = layout_.slots[parameter];
  auto& bucket = layout_.buckets[slot.bucket];
  if (bucket.device.is_cpu()) {
    return false;
  }
  const auto& gradient = layout_.parameters[parameter].grad();
  const auto bytes = is_alias(gradient, slot.view) ? 0 : bytes_of_gradient(gradient);
  if (bytes_ + bytes > kMostBytes) {
    flush_all();
  }
  if (bytes > kMostBytes) {
    return false;
  }
  bytes_ += bytes;
  bucket.held.push_back({parameter, gradient, bytes, scale, *bucket.stream});
  return true;
}

bool DeferredCopies::holds(int64_t parameter) const {
  const auto& held = layout_.buckets[layout_.slots[parameter].bucket].held;
  const auto& gradient = layout_.parameters[parameter].grad();
  return std::any_of(held.begin(), held.end(), [&](const auto& each) {
    return each.parameter == parameter && each.gradient.is_same(gradient);
  });
}

void DeferredCopies::flush(int64_t index) {
  auto& bucket = layout_.buckets[index];
  if (bucket.held.empty()) {
    return;
  }
  const at::NoGradGuard no_grad;
  bucket.join_current_stream();
  const auto held = std::exchange(bucket.held, {});
  const double scale = held.front().scale;
  CopyList copies;
  std::vector<at::Tensor> scaled;
  for (const auto& each : held) {
    bytes_ -= each.bytes;
    TORCH_INTERNAL_ASSERT(each.scale == scale, "one backward has one scale");
    const auto& view = layout_.slots[each.parameter].view;
    if (each.stream != *bucket.stream) {  // its memory is free once p.grad is the view
      each.gradient.record_stream(*bucket.stream);
    }
    if (is_alias(each.gradient, view) || (held.size() > 1 && copies.add(view, each.gradient))) {
      scaled.push_back(view);
    } else {
      copy_scaled(view, each.gradient, scale);
    }
  }
  copies.make();
  scale_views(bucket, scaled, scale);
  for (const auto& each : held) {
    give_view(each);
  }
}

/// Unless the program has put another gradient there, or none.
void DeferredCopies::give_view(const Bucket::Held& held) {
  auto& gradient = layout_.parameters[held.parameter].mutable_grad();
  const auto& view = layout_.slots[held.parameter].view;
  if (gradient.is_same(held.gradient) && !is_alias(gradient, view)) {
    gradient = layout_.views[held.parameter].over(view);
  }
}

void DeferredCopies::flush_all() {
  for (int64_t index = 0; index <= layout_.last(); ++index) {
    flush(index);
  }
}

void DeferredCopies::forget() {
  for (auto& bucket : layout_.buckets) {
    bucket.held.clear();
  }
  bytes_ = 0;
}

}  // namespace brimful
