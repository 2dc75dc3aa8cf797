#include "reducer/tail.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "base/fnv.h"
#include "reducer/bucket.h"
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

constexpr size_t kBits = 8;

std::vector<uint8_t> as_bits(const std::vector<uint8_t>& flags) {
  std::vector<uint8_t> bytes((flags.size() + kBits - 1) / kBits);
  for (size_t i = 0; i < flags.size(); ++i) {
    bytes[i / kBits] |= static_cast<uint8_t>((flags[i] != 0 ? 1 : 0) << (i % kBits));
  }
  return bytes;
}

/// Sets the flags whose bits are; returns what follows the bits.
const uint8_t* add_bits(const uint8_t* bytes, std::vector<uint8_t>& flags) {
  for (size_t i = 0; i < flags.size(); ++i) {
    flags[i] |= (bytes[i / kBits] >> (i % kBits)) & 1;
  }
  return bytes + (flags.size() + kBits - 1) / kBits;
}
}  // namespace

ControlRecord with_figures_of_host(const ControlRecord& record, const at::Tensor& loss_sum,
                                   const at::Tensor& updated) {
  auto own = record;
  if (loss_sum.defined() && loss_sum.is_cpu()) {
    own.loss_sum = *loss_sum.const_data_ptr<double>();
  }
  if (updated.defined() && updated.is_cpu()) {
    std::copy_n(updated.const_data_ptr<uint8_t>(), updated.numel(), own.updated.begin());
  }
  return own;
}

bool Tail::Rider::fits(const at::Tensor& tensor) const {
  return tensor.defined() && tensor.sizes() == at::IntArrayRef(sizes) &&
         tensor.scalar_type() == dtype && tensor.device() == device;
}

Tail::Tail(int64_t parameters, int rank, int world_size, std::vector<at::Tensor> buffers,
           c10::ScalarType dtype, int64_t sparse, Head head)
    : parameters_(parameters),
      rank_(rank),
      dtype_(dtype),
      sparse_(sparse),
      head_(head),
      used_(parameters),
      rows_(world_size, std::vector<int64_t>(sparse)) {
  for (auto& buffer : buffers) {
    const bool as_bytes = buffer.scalar_type() != dtype;
    const auto form = buffer.options();
    auto sizes = buffer.sizes().vec();
    riders_.push_back({std::move(buffer), form.dtype().toScalarType(), form.device(), 0, 0,
                       as_bytes, sizes, sizes});
  }
  head_numel_ = head_elements(world_size);
  sent_.resize(riders_.size());
  place_riders();
}

int64_t Tail::head_elements(int world_size) const {
  switch (head_) {
    case Head::all:
      return record_offset(world_size) + std::ssize(riders_);
    case Head::losses:
      return world_size * kNumberBytes;
    case Head::nothing:
      return 0;
  }
  return 0;
}

/// Those of the region's dtype, then the others by dtype: larger elements first, so that each lies where its dtype may.
std::vector<Tail::Rider*> Tail::riders_in_order() {
  const auto key = [](const Rider& rider) {
    const auto bytes = rider.as_bytes ? -static_cast<int64_t>(c10::elementSize(rider.dtype)) : 0;
    return std::tuple(rider.as_bytes, bytes, rider.dtype);
  };
  std::vector<Rider*> order;
  for (auto& rider : riders_) {
    order.push_back(&rider);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](const Rider* a, const Rider* b) { return key(*a) < key(*b); });
  return order;
}

void Tail::place_riders() {
  numel_ = head_numel_;
  for (auto* rider : riders_in_order()) {
    rider->offset = numel_;
    rider->numel = c10::multiply_integers(rider->sizes) *
                   (rider->as_bytes ? static_cast<int64_t>(c10::elementSize(rider->dtype)) : 1);
    numel_ += rider->numel;
  }
}

void Tail::take_up_sizes() {
  if (std::exchange(has_new_sizes_, false)) {
    --changes_left_;
    for (auto& rider : riders_) {
      rider.sizes = rider.new_sizes;
    }
    place_riders();
  }
}

bool Tail::has_other_sizes() const {
  return std::any_of(riders_.begin(), riders_.end(),
                     [](const Rider& rider) { return rider.new_sizes != rider.sizes; });
}

void Tail::note_sizes(int buffer_source) {
  is_source_ = rank_ == buffer_source;
  for (size_t i = 0; i < riders_.size(); ++i) {
    auto& rider = riders_[i];
    rider.new_sizes = rider.buffer.sizes().vec();
    sent_[i] = rank_ == buffer_source && rider.fits(rider.buffer) ? 1 : 0;
  }
  own_sizes_ = number_of(
      riders_, [](const Rider& rider) -> const auto& { return rider.new_sizes; });
}

void Tail::attach(at::Tensor region) {
  region_ = std::move(region);
  const auto host =
      at::TensorOptions().dtype(region_.scalar_type()).pinned_memory(region_.is_cuda());
  outgoing_ = at::zeros({head_ == Head::all ? head_numel_ : 0}, host);
  incoming_ = region_.is_cpu() ? region_.narrow(0, 0, head_numel_) : at::zeros({head_numel_}, host);
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

void Tail::write(const Contents& contents) {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  note_sizes(contents.buffer_source);
  if (head_ == Head::all) {
    write_head(contents);
  } else {
    own_used_ = contents.used;
    own_rows_ = contents.rows;
    if (head_ == Head::losses && contents.has_losses) {
      write_loss(contents);
    }
  }
  write_riders(is_source_);
}

void Tail::write_head(const Contents& contents) {
  const auto& [used, record, loss_sum, updated, rows, source, has_losses] = contents;
  const auto bytes = encode(with_figures_of_host(record, loss_sum, updated));
  write_bytes(outgoing_, 0, used.data(), parameters_);
  write_bytes(outgoing_, record_offset(rank_), bytes.data(), kRecordBytes);
  write_bytes(outgoing_, record_offset(rank_) + kRecordBytes,
              reinterpret_cast<const uint8_t*>(rows.data()), sparse_ * kNumberBytes);
  write_bytes(outgoing_, flags_offset(), sent_.data(), std::ssize(sent_));
  write_bytes(outgoing_, sizes_offset(rank_), reinterpret_cast<const uint8_t*>(&own_sizes_),
              sizes_bytes());
  region_.narrow(0, 0, head_numel_).copy_(outgoing_, /*non_blocking=*/true);
  if (loss_sum.defined() && !loss_sum.is_cpu()) {
    region_.narrow(0, record_offset(rank_) + kLossSumOffset, kNumberBytes)
        .copy_(loss_sum.reshape({1}).view(at::kByte));
  }
  if (updated.defined() && !updated.is_cpu()) {
    region_.narrow(0, record_offset(rank_) + kUpdatedOffset, updated.numel()).copy_(updated);
  }
}

void Tail::write_loss(const Contents& contents) {
  region_.narrow(0, 0, head_numel_).zero_();
  if (contents.loss_sum.defined()) {
    region_.narrow(0, rank_ * kNumberBytes, kNumberBytes)
        .copy_(contents.loss_sum.reshape({1}).view(at::kByte));
  }
}

void Tail::write_riders(bool is_source) {
  if (!shares_buffers()) {
    return;
  }
  if (!is_source) {
    region_.narrow(0, head_numel_, numel_ - head_numel_).zero_();
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

void Tail::fetch_head() {
  if (!region_.is_cpu()) {
    incoming_.copy_(region_.narrow(0, 0, head_numel_), /*non_blocking=*/true);
    c10::Event arrived(region_.device().type());
    arrived.record(
        c10::impl::VirtualGuardImpl(region_.device().type()).getStream(region_.device()));
    arrived.synchronize();
  }
}

void Tail::read() {
  fetch_head();
  read_bytes(incoming_, 0, used_.data(), parameters_);
  read_bytes(incoming_, flags_offset(), sent_.data(), std::ssize(sent_));
  records_.clear();
  std::vector<uint64_t> sizes(rows_.size());
  for (int rank = 0; rank < std::ssize(rows_); ++rank) {
    RecordBytes bytes{};
    read_bytes(incoming_, record_offset(rank), bytes.data(), kRecordBytes);
    records_.push_back(decode(bytes));
    read_bytes(incoming_, record_offset(rank) + kRecordBytes,
               reinterpret_cast<uint8_t*>(rows_[rank].data()), sparse_ * kNumberBytes);
    read_bytes(incoming_, sizes_offset(rank), reinterpret_cast<uint8_t*>(&sizes[rank]),
               sizes_bytes());
  }
  note_heads(riders_.empty() ? std::vector<uint64_t>() : sizes);
}

std::shared_ptr<LateLosses> Tail::late_losses() const {
  const auto read = [ranks = rows_.size()](const at::Tensor& host) {
    std::vector<double> losses(ranks);
    for (size_t rank = 0; rank < ranks; ++rank) {
      read_bytes(host, static_cast<int64_t>(rank) * kNumberBytes,
                 reinterpret_cast<uint8_t*>(&losses[rank]), kNumberBytes);
    }
    return losses;
  };
  return std::make_shared<LateLosses>(region_.narrow(0, 0, head_numel_), read);
}

void Tail::note_heads(const std::vector<uint64_t>& sizes) {
  const bool alike = std::all_of(sizes.begin(), sizes.end(),
                                 [&](uint64_t theirs) { return theirs == own_sizes_; });
  has_new_sizes_ =
      sizes.size() > 1 && !riders_.empty() && alike && changes_left_ > 0 && has_other_sizes();
}

bool Tail::has_more() const {
  const auto is_no = [](uint8_t flag) { return flag == 0; };
  return std::any_of(own_used_.begin(), own_used_.end(), is_no) ||
         std::any_of(own_rows_.begin(), own_rows_.end(), [](int64_t rows) { return rows > 0; }) ||
         (is_source_ && std::any_of(sent_.begin(), sent_.end(), is_no));
}

std::vector<uint8_t> Tail::more() const {
  auto bytes = as_bits(own_used_);
  const auto sent = as_bits(sent_);
  bytes.insert(bytes.end(), sent.begin(), sent.end());
  const auto* rows = reinterpret_cast<const uint8_t*>(own_rows_.data());
  bytes.insert(bytes.end(), rows, rows + sparse_ * kNumberBytes);
  return bytes;
}

void Tail::take(const std::vector<uint64_t>& sizes, const std::vector<std::vector<uint8_t>>& more) {
  note_heads(sizes);
  const uint8_t usual = more.empty() ? 1 : 0;
  std::fill(used_.begin(), used_.end(), usual);
  std::fill(sent_.begin(), sent_.end(), usual);
  for (size_t rank = 0; rank < rows_.size(); ++rank) {
    std::fill(rows_[rank].begin(), rows_[rank].end(), 0);
    if (!more.empty()) {
      const auto* at = add_bits(more[rank].data(), used_);
      at = add_bits(at, sent_);
      std::memcpy(rows_[rank].data(), at, sparse_ * kNumberBytes);
    }
  }
}

std::vector<int64_t> Tail::rows(int64_t sparse) const {
  std::vector<int64_t> by_rank;
  by_rank.reserve(rows_.size());
  for (const auto& rows : rows_) {
    by_rank.push_back(rows[sparse]);
  }
  return by_rank;
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
  if (rows_.size() > 1 && !has_new_sizes_ && !std::exchange(rider.was_logged, true)) {
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
    if (sent_[i] == 0 || !rider.fits(rider.buffer)) {
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
