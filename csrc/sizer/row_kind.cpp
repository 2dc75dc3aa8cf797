#include <ATen/ATen.h>
#include <brimful/sizer/row_kind.h>
#include <c10/core/WrapDimMinimal.h>

#include "base/fnv.h"

namespace brimful {

void RowKind::add(const at::Tensor& tensor, std::optional<int64_t> row_dim) {
  if (!tensor.defined()) {
    form += "-;";
    return;
  }
  form += c10::toString(tensor.scalar_type());
  if (tensor.layout() != at::kStrided || tensor.is_nested()) {
    form += "*;";
    uneven = true;
    return;
  }
  form += std::to_string(tensor.dim()) + ';';
  const auto rows =
      row_dim && tensor.dim() > 0 ? c10::maybe_wrap_dim(*row_dim, tensor.dim()) : int64_t{-1};
  int64_t of_row = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (dim != rows) {
      sizes.push_back(tensor.size(dim));
      of_row *= tensor.size(dim);
    }
  }
  elements += of_row;
}

uint32_t fingerprint(const RowKind& kind) {
  Fnv<uint32_t> hash;
  hash.add(kind.form);
  for (const auto size : kind.sizes) {
    hash.add(static_cast<uint64_t>(size));
  }
  return hash.value();
}

}  // namespace brimful
