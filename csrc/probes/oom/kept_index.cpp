#include "probes/oom/kept_index.h"
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <algorithm>
#include "memory/cuda.h"

namespace brimful::probes {
namespace {

std::optional<IndexRange> range_in(const at::Tensor& index, std::optional<int64_t> ignored) {
  return index.scalar_type() == at::kLong
             ? range_of(index.const_data_ptr<int64_t>(), index.numel(), ignored)
             : range_of(index.const_data_ptr<int32_t>(), index.numel(), ignored);
}

}  // namespace

KeptIndex::KeptIndex(const IndexUse& use)
    : first_(use.first), last_(use.last), ignored_(use.ignored) {
  const auto& index = use.index;
  const bool is_short = index.numel() <= PinnedCopy::kMostCopied;
  if (index.is_cpu()) {
    if (is_short && index.is_contiguous()) {
      range_ = range_in(index, ignored_);
    } else {
      tensor_ = c10::weak_intrusive_ptr<c10::TensorImpl>(index.getIntrusivePtr());
    }
  } else if (index.is_cuda() && is_short && memory::cuda_is_capturing(index.device()) == false) {
    copy_ = PinnedCopy::begin(use);
    dropped_ = copy_ == nullptr;
  }
}

std::optional<IndexRange> KeptIndex::range() const {
  if (copy_) {
    return copy_->range();
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
