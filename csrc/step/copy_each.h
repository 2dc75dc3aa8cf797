#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace brimful {

/// Visits the places of tensors of one device and dtype together: `_foreach` kernels are one launch for many of these.
void for_each_kind(const std::vector<at::Tensor>& tensors,
                   const std::function<void(const std::vector<size_t>&)>& visit);

/// to[i].copy_(from[i]) for all, in as few launches as there are kinds. Each pair has the same dtype and device.
void copy_each(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from);

}  // namespace brimful
