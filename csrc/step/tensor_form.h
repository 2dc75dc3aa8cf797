#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace brimful {

/// How a tensor lies in its storage. Nothing for a tensor without strides.
struct TensorForm {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset = 0;

  static TensorForm of(const at::Tensor& tensor) {
    if (tensor.layout() != at::kStrided) {
      return {};
    }
    return {tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset()};
  }
  bool is_of(const at::Tensor& tensor) const {
    return tensor.layout() != at::kStrided ||
           (tensor.sizes() == at::IntArrayRef(sizes) &&
            tensor.strides() == at::IntArrayRef(strides) && tensor.storage_offset() == offset);
  }
  /// Without a trace in its version. Its storage must have the room.
  void put(const at::Tensor& tensor) const {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  }
};

}  // namespace brimful
