#include "reducer/tail.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <brimful/memory/stats.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "reducer/bucket.h"

namespace brimful {

Tail::Tail(int64_t parameters, int rank, int world_size, std::vector<at::Tensor> buffers,
           c10::ScalarType dtype, int64_t sparse)
    : parameters_(parameters),
      rank_(rank),
      world_size_(world_size),
      dtype_(dtype),
      sparse_(sparse),
      head_numel_(record_offset(world_size)),
      numel_(head_numel_),
      used_(parameters),
      rows_(world_size, std::vector<int64_t>(sparse)) {
  for (auto& buffer : buffers) {
    const bool as_bytes = buffer.scalar_type() != dtype;
    const int64_t numel =
        buffer.numel() * (as_bytes ? static_cast<int64_t>(buffer.element_size()) : 1);
    riders_.push_back({std::move(buffer), numel_, numel, as_bytes});
    numel_ += numel;
  }
}

void Tail::attach(at::Tensor region) {
  region_ = std::move(region);
  const auto host =
      at::TensorOptions().dtype(region_.scalar_type()).pinned_memory(region_.is_cuda());
  outgoing_ = at::zeros({head_numel_}, host);
  incoming_ = region_.is_cpu() ? region_.narrow(0, 0, head_numel_) : at::zeros({head_numel_}, host);
}

void Tail::write(const std::vector<uint8_t>& used, const ControlRecord& record,
                 const at::Tensor& loss_sum, const at::Tensor& updated, int buffer_source,
                 const std::vector<int64_t>& rows) {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  auto own = record;
  if (loss_sum.defined() && loss_sum.is_cpu()) {
    own.loss_sum = *loss_sum.const_data_ptr<double>();
  }
  if (updated.defined() && updated.is_cpu()) {
    std::copy_n(updated.const_data_ptr<uint8_t>(), updated.numel(), own.updated.begin());
  }
  const auto bytes = encode(own);
  write_bytes(outgoing_, 0, used.data(), parameters_);
  write_bytes(outgoing_, record_offset(rank_), bytes.data(), kRecordBytes);
  write_bytes(outgoing_, record_offset(rank_) + kRecordBytes,
              reinterpret_cast<const uint8_t*>(rows.data()), sparse_ * kRowsBytes);
  region_.narrow(0, 0, head_numel_).copy_(outgoing_, /*non_blocking=*/true);
  if (loss_sum.defined() && !loss_sum.is_cpu()) {
    region_.narrow(0, record_offset(rank_) + kLossSumOffset, 8)
        .copy_(loss_sum.reshape({1}).view(at::kByte));
  }
  if (updated.defined() && !updated.is_cpu()) {
    region_.narrow(0, record_offset(rank_) + kUpdatedOffset, updated.numel()).copy_(updated);
  }
  if (riders_.empty()) {
    return;
  }
  if (rank_ != buffer_source) {
    region_.narrow(0, head_numel_, numel_ - head_numel_).zero_();
    return;
  }
  for (const auto& rider : riders_) {
    const auto values = rider.buffer.detach().reshape({-1});
    region_.narrow(0, rider.offset, rider.numel)
        .copy_(rider.as_bytes ? values.view(at::kByte) : values);
  }
}

void Tail::read() {
  if (!region_.is_cpu()) {
    incoming_.copy_(region_.narrow(0, 0, head_numel_), /*non_blocking=*/true);
    c10::Event arrived(region_.device().type());
    arrived.record(
        c10::impl::VirtualGuardImpl(region_.device().type()).getStream(region_.device()));
    arrived.synchronize();
  }
  read_bytes(incoming_, 0, used_.data(), parameters_);
  records_.clear();
  for (int rank = 0; rank < world_size_; ++rank) {
    RecordBytes bytes{};
    read_bytes(incoming_, record_offset(rank), bytes.data(), kRecordBytes);
    records_.push_back(decode(bytes));
    read_bytes(incoming_, record_offset(rank) + kRecordBytes,
               reinterpret_cast<uint8_t*>(rows_[rank].data()), sparse_ * kRowsBytes);
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
      const bool alike = now.defined() && now.sizes() == before.sizes() &&
                         now.scalar_type() == before.scalar_type() &&
                         now.device() == before.device();
      if (alike) {
        rider.buffer = now;
      }
      return alike;
    }
  }
  return true;
}

void Tail::write_back_buffers() {
  const memory::Unlimited unlimited;
  const at::NoGradGuard no_grad;
  for (const auto& rider : riders_) {
    auto values = region_.narrow(0, rider.offset, rider.numel);
    if (rider.as_bytes) {
      values = values.to(at::kByte).view(rider.buffer.scalar_type());
    }
    rider.buffer.variable_data().copy_(values.view(rider.buffer.sizes()));
  }
}

}  // namespace brimful
