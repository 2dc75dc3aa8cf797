#include "reducer/tail_head.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "memory/host_tensor.h"
#include "reducer/bucket.h"

namespace brimful {
namespace {
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

ControlRecord with_figures_of_host(const Announcement& said, const at::Tensor& updated) {
  auto own = said.record;
  const auto& loss_sum = said.loss_sum;
  if (loss_sum.defined() && loss_sum.is_cpu()) {
    own.loss_sum = *loss_sum.const_data_ptr<double>();
  }
  if (updated.defined() && updated.is_cpu()) {
    std::copy_n(updated.const_data_ptr<uint8_t>(), updated.numel(), own.updated.begin());
  }
  return own;
}

TailHead::TailHead(const Form& form, size_t buffers)
    : form_(form),
      used_(form.parameters),
      rows_(form.world_size, std::vector<int64_t>(form.sparse)),
      sent_(buffers) {
  if (form_.place == Place::all) {
    numel_ = record_offset(form_.world_size) + std::ssize(sent_);
  } else if (form_.place == Place::losses) {
    numel_ = kFigures * form_.world_size * kNumberBytes;
  }
}

void TailHead::attach(at::Tensor region) {
  region_ = std::move(region);
  if (form_.place != Place::all) {
    return;
  }
  const auto on_host = [this] {
    return memory::zeros_on_host({numel_}, region_.scalar_type(), region_.device());
  };
  outgoing_ = on_host();
  incoming_ = region_.is_cpu() ? region_ : on_host();
}

void TailHead::note_buffers(std::vector<uint8_t> sent, uint64_t sizes) {
  sent_ = std::move(sent);
  own_sizes_ = sizes;
}

void TailHead::write(const Contents& contents) {
  gives_buffers_ = contents.buffer_source == form_.rank;
  if (form_.place == Place::all) {
    write_all(contents);
    return;
  }
  own_used_ = contents.used;
  own_rows_ = contents.rows;
  if (form_.place == Place::losses && contents.has_losses) {
    write_figures(contents.said);
  }
}

void TailHead::write_all(const Contents& contents) {
  const auto& [used, said, updated, rows, source, has_losses] = contents;
  const auto& loss_sum = said.loss_sum;
  const auto bytes = encode(with_figures_of_host(said, updated));
  write_bytes(outgoing_, 0, used.data(), form_.parameters);
  write_bytes(outgoing_, record_offset(form_.rank), bytes.data(), kRecordBytes);
  write_bytes(outgoing_, record_offset(form_.rank) + kRecordBytes,
              reinterpret_cast<const uint8_t*>(rows.data()), form_.sparse * kNumberBytes);
  write_bytes(outgoing_, flags_offset(), sent_.data(), std::ssize(sent_));
  write_bytes(outgoing_, sizes_offset(form_.rank), reinterpret_cast<const uint8_t*>(&own_sizes_),
              sizes_bytes());
  region_.copy_(outgoing_, /*non_blocking=*/true);
  if (loss_sum.defined() && !loss_sum.is_cpu()) {
    region_.narrow(0, record_offset(form_.rank) + kLossSumOffset, kNumberBytes)
        .copy_(loss_sum.reshape({1}).view(at::kByte));
  }
  if (updated.defined() && !updated.is_cpu()) {
    region_.narrow(0, record_offset(form_.rank) + kUpdatedOffset, updated.numel()).copy_(updated);
  }
}

void TailHead::write_figures(const Announcement& said) {
  region_.zero_();
  write_figure(0, said.loss_sum);
  write_figure(1, said.late_weight);
}

void TailHead::write_figure(int64_t column, const at::Tensor& value) {
  if (value.defined()) {
    region_.narrow(0, (column * form_.world_size + form_.rank) * kNumberBytes, kNumberBytes)
        .copy_(value.reshape({1}).view(at::kByte));
  }
}

void TailHead::read() {
  if (!region_.is_cpu()) {
    incoming_.copy_(region_, /*non_blocking=*/true);
    c10::Event arrived(region_.device().type());
    arrived.record(
        c10::impl::VirtualGuardImpl(region_.device().type()).getStream(region_.device()));
    arrived.synchronize();
  }
  read_bytes(incoming_, 0, used_.data(), form_.parameters);
  read_bytes(incoming_, flags_offset(), sent_.data(), std::ssize(sent_));
  records_.clear();
  std::vector<uint64_t> sizes(rows_.size());
  for (int rank = 0; rank < std::ssize(rows_); ++rank) {
    RecordBytes bytes{};
    read_bytes(incoming_, record_offset(rank), bytes.data(), kRecordBytes);
    records_.push_back(decode(bytes));
    read_bytes(incoming_, record_offset(rank) + kRecordBytes,
               reinterpret_cast<uint8_t*>(rows_[rank].data()), form_.sparse * kNumberBytes);
    read_bytes(incoming_, sizes_offset(rank), reinterpret_cast<uint8_t*>(&sizes[rank]),
               sizes_bytes());
  }
  note_sizes(sizes);
}

at::Tensor TailHead::figures(int64_t column) const {
  const auto bytes = form_.world_size * kNumberBytes;
  return region_.narrow(0, column * bytes, bytes).to(at::kByte).view(at::kDouble);
}

void TailHead::note_sizes(const std::vector<uint64_t>& sizes) {
  sizes_are_alike_ = sent_.empty() || std::all_of(sizes.begin(), sizes.end(), [&](uint64_t theirs) {
                       return theirs == own_sizes_;
                     });
}

bool TailHead::has_more() const {
  const auto is_no = [](uint8_t flag) { return flag == 0; };
  return std::any_of(own_used_.begin(), own_used_.end(), is_no) ||
         std::any_of(own_rows_.begin(), own_rows_.end(), [](int64_t rows) { return rows > 0; }) ||
         (gives_buffers_ && std::any_of(sent_.begin(), sent_.end(), is_no));
}

std::vector<uint8_t> TailHead::more() const {
  auto bytes = as_bits(own_used_);
  const auto sent = as_bits(sent_);
  bytes.insert(bytes.end(), sent.begin(), sent.end());
  const auto* rows = reinterpret_cast<const uint8_t*>(own_rows_.data());
  bytes.insert(bytes.end(), rows, rows + form_.sparse * kNumberBytes);
  return bytes;
}

void TailHead::take(const std::vector<uint64_t>& sizes,
                    const std::vector<std::vector<uint8_t>>& more) {
  note_sizes(sizes);
  const uint8_t usual = more.empty() ? 1 : 0;
  std::fill(used_.begin(), used_.end(), usual);
  std::fill(sent_.begin(), sent_.end(), usual);
  for (size_t rank = 0; rank < rows_.size(); ++rank) {
    std::fill(rows_[rank].begin(), rows_[rank].end(), 0);
    if (!more.empty()) {
      const auto* at = add_bits(more[rank].data(), used_);
      at = add_bits(at, sent_);
      std::memcpy(rows_[rank].data(), at, form_.sparse * kNumberBytes);
    }
  }
}

std::vector<int64_t> TailHead::rows(int64_t sparse) const {
  std::vector<int64_t> by_rank;
  by_rank.reserve(rows_.size());
  for (const auto& rows : rows_) {
    by_rank.push_back(rows[sparse]);
  }
  return by_rank;
}

}  // namespace brimful
