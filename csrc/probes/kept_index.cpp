#include "probes/kept_index.h"
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <algorithm>
#include "memory/cuda.h"

namespace brimful::probes {
namespace {

constexpr uint64_t kPlaces = 256;

std::optional<IndexRange> range_in(const at::Tensor& index, std::optional<int64_t> ignored) {
  return index.scalar_type() == at::kLong
             ? range_of(index.const_data_ptr<int64_t>(), index.numel(), ignored)
             : range_of(index.const_data_ptr<int32_t>(), index.numel(), ignored);
}

/// Pinned memory for CUDA's copies: made once and never freed, since freeing asks a device that may be dead.
at::Tensor pinned_place(uint64_t place, at::IntArrayRef sizes, int64_t count) {
  static auto* all =
      new at::Tensor(at::empty({static_cast<int64_t>(kPlaces), KeptIndex::kMostCopied},
                               at::TensorOptions().dtype(at::kLong).pinned_memory(true)));
  return all->select(0, static_cast<int64_t>(place % kPlaces)).narrow(0, 0, count).view(sizes);
}

}  // namespace

KeptIndex::KeptIndex(const IndexUse& use, uint64_t place)
    : first_(use.first), last_(use.last), ignored_(use.ignored) {
  const auto& index = use.index;
  const bool is_short = index.numel() <= kMostCopied;
  if (index.is_cpu()) {
    if (is_short && index.is_contiguous()) {
      range_ = range_in(index, ignored_);
    } else {
      tensor_ = c10::weak_intrusive_ptr<c10::TensorImpl>(index.getIntrusivePtr());
    }
  } else if (index.is_cuda() && is_short && memory::cuda_is_capturing() == false) {
    copy_from_cuda(index, place);
  }
}

void KeptIndex::copy_from_cuda(const at::Tensor& index, uint64_t place) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto copy = pinned_place(place, index.sizes(), index.numel());
  copy.fill_(first_);  // harmless, until the copy has come
  copy.copy_(index, /*non_blocking=*/true);
  pinned_ = copy.const_data_ptr<int64_t>();
  count_ = index.numel();
}

std::optional<IndexRange> KeptIndex::range() const {
  if (pinned_ != nullptr) {
    return range_of(pinned_, count_, ignored_);
  }
  if (!tensor_) {
    return range_;
  }
  const auto alive = tensor_->lock();
  if (!alive) {
    return std::nullopt;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return range_in(at::Tensor(alive).contiguous(), ignored_);
}

}  // namespace brimful::probes
