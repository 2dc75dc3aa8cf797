#include "reducer/copy_list.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <utility>

namespace brimful {
namespace {
/// Those of which CUDA's kernel for many copies knows.
bool is_copied_together(c10::ScalarType dtype) {
  return dtype <= at::kDouble || dtype == at::kComplexFloat || dtype == at::kComplexDouble ||
         dtype == at::kBool || dtype == at::kBFloat16;
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

/// The tensor with these strides, if it has them but where there is one element or none: a gradient of a convolution of one
/// pixel differs there. Else undefined.
at::Tensor with_strides(const at::Tensor& tensor, at::IntArrayRef strides) {
  if (tensor.strides() == strides) {
    return tensor;
  }
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1 && tensor.stride(i) != strides[i]) {
      return {};
    }
  }
  const at::AutoDispatchBelowADInplaceOrView no_view_metadata;
  return tensor.as_strided(tensor.sizes(), strides, tensor.storage_offset());
}
}  // namespace

bool CopyList::add(const at::Tensor& to, const at::Tensor& from) {
  const bool alike = is_plain(to) && is_plain(from) && to.scalar_type() == from.scalar_type() &&
                     to.device() == from.device() && to.sizes() == from.sizes() &&
                     to.is_non_overlapping_and_dense() && is_copied_together(to.scalar_type());
  const auto source = alike ? with_strides(from, to.strides()) : at::Tensor();
  if (!source.defined()) {
    return false;
  }
  auto& list = of(to);
  list.to.push_back(to);
  list.from.push_back(source);
  return true;
}

CopyList::Alike& CopyList::of(const at::Tensor& to) {
  const auto found = std::find_if(lists_.begin(), lists_.end(), [&](const Alike& list) {
    return list.to[0].scalar_type() == to.scalar_type() && list.to[0].device() == to.device();
  });
  return found == lists_.end() ? lists_.emplace_back() : *found;
}

void CopyList::make() {
  for (const auto& list : std::exchange(lists_, {})) {
    if (list.to.size() == 1) {
      list.to[0].copy_(list.from[0], /*non_blocking=*/true);
    } else {
      at::_foreach_copy_(list.to, list.from, /*non_blocking=*/true);
    }
  }
}

}  // namespace brimful
