// What a plan becomes: slots, buckets and their memory. A new plan takes the place of an old one between steps.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/error.h>
#include <brimful/log.h>
#include <brimful/memory/categories.h>
#include <brimful/memory/stats.h>

#include <algorithm>
#include <map>
#include <unordered_set>
#include <utility>

#include "reducer/bucket_set.h"

namespace brimful {
namespace {
/// Direct buckets of one dtype and device drain from the same memory: all ranks throw away the sum of a failed step.
void share_drain_memory(const std::vector<Bucket>& buckets, std::vector<at::Tensor>& rows) {
  std::map<std::pair<c10::ScalarType, std::string>, at::Tensor> shared;
  std::vector<size_t> order;
  for (size_t i = 0; i < buckets.size(); ++i) {
    if (rows[i].defined()) {
      order.push_back(i);
    }
  }
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return rows[a].numel() > rows[b].numel(); });
  for (const auto i : order) {
    auto& memory = shared[{rows[i].scalar_type(), rows[i].device().str()}];
    if (!memory.defined()) {
      memory = at::zeros_like(rows[i]);
    }
    rows[i] = memory.narrow(0, 0, rows[i].numel());
  }
}

/// By parameter: the rounding error that is carried from step to step, which a new plan must not forget; undefined for nothing.
std::vector<at::Tensor> carried_errors(const std::vector<Slot>& slots,
                                       const std::vector<Bucket>& buckets) {
  std::vector<at::Tensor> errors(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto& bucket = buckets[slots[i].bucket];
    if (!bucket.wire || !bucket.wire->error().defined() || slots[i].numel == 0) {
      continue;
    }
    errors[i] = bucket.wire->error();
    if (!bucket.direct) {
      const auto& view = slots[i].view;
      const auto bytes = static_cast<const char*>(view.const_data_ptr()) -
                         static_cast<const char*>(bucket.gradients.const_data_ptr());
      errors[i] = errors[i].narrow(0, bytes / bucket.gradients.element_size(),
                                   view.numel() * (view.is_complex() ? 2 : 1));
    }
  }
  return errors;
}
}  // namespace

std::optional<int64_t> BucketSet::shared_with(const std::vector<at::Tensor>& others) const {
  std::unordered_set<const c10::TensorImpl*> known;
  for (const auto& other : others) {
    known.insert(other.unsafeGetTensorImpl());
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (known.count(parameters[i].unsafeGetTensorImpl()) > 0) {
      return static_cast<int64_t>(i);
    }
  }
  return std::nullopt;
}

std::string BucketSet::name_of(int64_t parameter) const {
  return static_cast<size_t>(parameter) < names.size() ? names[parameter]
                                                       : std::to_string(parameter);
}

// A gradient of another shape would be read past its end, or be broadcast silently; sending another size than
// the other ranks' would end their processes (gloo).
void BucketSet::require_unchanged(int64_t parameter, const at::Tensor& gradient) const {
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

void BucketSet::let_go_of(size_t parameter) {
  try {
    views[parameter].let_go();
  } catch (const c10::OutOfMemoryError&) {
    log(LogLevel::warning,
        "a gradient that the program kept from an earlier step is lost: no memory");
  }
}

void BucketSet::let_go_of_earlier(int64_t index) {
  for (const auto parameter : buckets[index].parameters) {
    const auto& gradient = parameters[parameter].grad();
    if (gradient.defined() && is_alias(gradient, slots[parameter].view)) {
      continue;  // of this step
    }
    let_go_of(parameter);
  }
}

void BucketSet::lay_out(BucketPlan new_plan, bool dense, bool encodes) {
  const memory::Unlimited unlimited;  // all ranks change together: no way back
  const memory::CategoryScope what_is_made(memory::Category::communication);
  const at::NoGradGuard no_grad;
  std::vector<std::pair<size_t, at::Tensor>> held;
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto& gradient = parameters[i].grad();
    if (is_alias(gradient, slots[i].view)) {
      held.emplace_back(i, gradient.cpu().clone());
    } else {
      let_go_of(i);
    }
  }
  const auto errors = carried_errors(slots, buckets);
  slots.clear();
  buckets.clear();
  tail->take_up_sizes();
  auto layout = arenas.carve(new_plan, tail->numel(), parameters, dense);
  slots = std::move(layout.slots);
  buckets = std::move(layout.buckets);
  plan = std::move(new_plan);

  std::vector<at::Tensor> drains(buckets.size());
  for (int64_t index = 0; index < last(); ++index) {
    auto& bucket = buckets[index];
    if (bucket.sparse()) {
      continue;
    }
    const auto row =
        bucket.direct ? as_row(parameters[bucket.parameters[0]].detach()) : bucket.gradients;
    if (wire_dtype && encodes && row.scalar_type() != *wire_dtype) {
      bucket.wire = std::make_unique<Wire>(row, *wire_dtype, error_feedback);
    } else if (bucket.direct) {
      drains[index] = row;
    }
  }
  const auto places = carried_errors(slots, buckets);
  for (size_t i = 0; i < errors.size(); ++i) {
    if (errors[i].defined()) {
      places[i].copy_(errors[i]);
    }
  }
  share_drain_memory(buckets, drains);
  for (size_t i = 0; i < drains.size(); ++i) {
    buckets[i].drain = drains[i];
  }
  const auto& flat = buckets.back().flat;
  tail->attach(flat.narrow(0, flat.numel() - tail->numel(), tail->numel()));
  for (auto& [i, gradient] : held) {
    slots[i].view.copy_(gradient);
    parameters[i].mutable_grad() = views[i].over(slots[i].view);
  }
  log(LogLevel::debug, "bucket plan\n" + to_string(plan, infos));
}

at::Tensor BucketSet::row_of(const Bucket& bucket) const {
  return bucket.direct ? as_row(bucket.own) : bucket.gradients;
}

at::Tensor BucketSet::payload(const Bucket& bucket) const {
  if (bucket.wire) {
    return bucket.wire->buffer();
  }
  return bucket.direct ? as_row(bucket.own) : bucket.flat;
}

std::vector<int64_t> BucketSet::own_rows() const {
  std::vector<int64_t> rows;
  for (const auto& bucket : buckets) {
    if (bucket.sparse()) {
      rows.push_back(bucket.own.defined() ? bucket.own._nnz() : 0);
    }
  }
  return rows;
}

}  // namespace brimful
