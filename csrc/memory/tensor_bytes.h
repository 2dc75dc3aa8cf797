#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace brimful::memory {

/// Bytes of a tensor's elements, of a sparse one's indices and values; 0 for one that is undefined or of another layout.
inline int64_t bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return 0;
  }
  if (tensor.layout() == at::kSparse) {
    return static_cast<int64_t>(tensor._values().nbytes() + tensor._indices().nbytes());
  }
  return tensor.layout() == at::kStrided ? static_cast<int64_t>(tensor.nbytes()) : 0;
}

}  // namespace brimful::memory
