#include "reducer/tail.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/fnv.h"
#include "reducer/copy_list.h"

namespace brimful {

namespace {
/// The same for the same sizes, and hardly for others.
template <typename Riders, typename SizesOf>
uint64_t number_of(const Riders& riders, const SizesOf& sizes_of) {
  Fnv<uint64_t> hash;
  for (const auto& rider : riders) {
    const auto& sizes = sizes_of(rider);
    hash.add_word(sizes.size());
    for (const auto size : sizes) {
      hash.add_word(static_cast<uint64_t>(size));
    }
  }
  return hash.value();
}
}  // namespace

bool Tail::Rider::fits(const at::Tensor& tensor) const {
  return tensor.defined() && tensor.sizes() == at::IntArrayRef(sizes) &&
         tensor.scalar_type() == dtype && tensor.device() == device;
}

Tail::Tail(const TailHead::Form& form, std::vector<at::Tensor> buffers, c10::ScalarType dtype)
    : head_(form, buffers.size()), rank_(form.rank), dtype_(dtype) {
  for (auto& buffer : buffers) {
    const bool as_bytes = buffer.scalar_type() != dtype;
    const auto options = buffer.options();
    auto sizes = buffer.sizes().vec();
    riders_.push_back({std::move(buffer), options.dtype().toScalarType(), options.device(), 0, 0,
                       as_bytes, sizes, sizes});
  }
  place_riders();
}

/// Those of the region's dtype, then the others by dtype: larger elements first, so that each lies where its dtype may.
std::vector<Tail::Rider*> Tail::riders_in_order() {
  const auto key = [](const Rider& rider) {
    const auto bytes = rider.as_bytes ? -static_cast<int64_t>(c10::elementSize(rider.dtype)) : 0;
    return std::tuple(rider.as_bytes, bytes, rider.dtype);
  };
  std::vector<Rider*> order;
  order.reserve(riders_.size());
  for (auto& rider : riders_) {
    order.push_back(&rider);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](const Rider* a, const Rider* b) { return key(*a) < key(*b); });
  return order;
}

void Tail::place_riders() {
  numel_ = head_.numel();
  for (auto* rider : riders_in_order()) {
    rider->offset = numel_;
    rider->numel = c10::multiply_integers(rider->sizes) *
                   (rider->as_bytes ? static_cast<int64_t>(c10::elementSize(rider->dtype)) : 1);
    numel_ += rider->numel;
  }
}

void Tail::take_up_sizes() {
  if (has_new_sizes()) {
    --changes_left_;
    for (auto& rider : riders_) {
      rider.sizes = rider.new_sizes;
    }
    place_riders();
  }
}

bool Tail::has_new_sizes() const {
  return shares_buffers() && head_.sizes_are_alike() && changes_left_ > 0 && has_other_sizes();
}

bool Tail::has_other_sizes() const {
  return std::any_of(riders_.begin(), riders_.end(),
                     [](const Rider& rider) { return rider.new_sizes != rider.sizes; });
}

void Tail::note_sizes(bool is_source) {
  std::vector<uint8_t> sent;
  sent.reserve(riders_.size());
  for (auto& rider : riders_) {
    rider.new_sizes = rider.buffer.sizes().vec();
    sent.push_back(is_source && rider.fits(rider.buffer) ? 1 : 0);
  }
  head_.note_buffers(std::move(sent), number_of(
                                          riders_, [](const Rider& rider) -> const auto& {
                                            return rider.new_sizes;
                                          }));
}

void Tail::attach(at::Tensor region) {
  region_ = std::move(region);
  head_.attach(region_.narrow(0, 0, head_.numel()));
  attach_riders();
}

void Tail::attach_riders() {
  if (!shares_buffers()) {
    return;
  }
  int64_t begin = numel_;
  for (const auto& rider : riders_) {
    begin = rider.as_bytes ? std::min(begin, rider.offset) : begin;
  }
  bytes_ =
      at::zeros({numel_ - begin}, at::TensorOptions().dtype(at::kByte).device(region_.device()));
  for (auto& rider : riders_) {
    const auto row = rider.as_bytes
                         ? bytes_.narrow(0, rider.offset - begin, rider.numel).view(rider.dtype)
                         : region_.narrow(0, rider.offset, rider.numel);
    rider.place = row.view(rider.sizes);
  }
}

void Tail::write(const TailHead::Contents& contents) {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  const bool is_source = rank_ == contents.buffer_source;
  note_sizes(is_source);
  head_.write(contents);
  write_riders(is_source);
}

void Tail::write_riders(bool is_source) {
  if (!shares_buffers()) {
    return;
  }
  if (!is_source) {
    region_.narrow(0, head_.numel(), numel_ - head_.numel()).zero_();
    return;
  }
  CopyList copies;
  for (const auto& rider : riders_) {
    if (!rider.fits(rider.buffer)) {
      rider.place.zero_();
    } else if (!copies.add(rider.place, rider.buffer)) {
      rider.place.copy_(rider.buffer, /*non_blocking=*/true);
    }
  }
  copies.make();
  if (bytes_.numel() > 0) {
    region_of_bytes().copy_(bytes_);
  }
}

bool Tail::replace(const at::Tensor& before, const at::Tensor& now) {
  for (auto& rider : riders_) {
    if (rider.buffer.is_same(before)) {
      const bool alike = rider.fits(now);
      if (alike) {
        rider.buffer = now;
      }
      return alike;
    }
  }
  return true;
}

void Tail::note_unlike(Rider& rider, size_t number) const {
  if (head_.world_size() > 1 && !has_new_sizes() && !std::exchange(rider.was_logged, true)) {
    log(LogLevel::warning,
        c10::str("a buffer has another size than in earlier steps, and not the same on all ranks "
                 "or again and again: it is not made equal on all ranks (buffer: ",
                 number, ", size: ", rider.buffer.sizes(),
                 ", before: ", at::IntArrayRef(rider.sizes),
                 "); give it its size before the module is wrapped, as by a forward"));
  }
}

void Tail::write_back_buffers() {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  if (!shares_buffers()) {
    return;
  }
  if (bytes_.numel() > 0) {
    bytes_.copy_(region_of_bytes());
  }
  CopyList copies;
  for (size_t i = 0; i < riders_.size(); ++i) {
    auto& rider = riders_[i];
    if (!head_.is_sent(i) || !rider.fits(rider.buffer)) {
      note_unlike(rider, i);
      continue;
    }
    if (rider.numel == 0) {
      continue;
    }
    const auto values = rider.buffer.variable_data();
    if (!copies.add(values, rider.place)) {
      values.copy_(rider.place, /*non_blocking=*/true);
    }
  }
  copies.make();
}

}  // namespace brimful
