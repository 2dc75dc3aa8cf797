#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <unordered_set>
#include <utility>
#include <vector>

namespace brimful {

/// The same in order, each tensor once and none undefined. LibTorch's parameters(), named_parameters() and buffers() list
/// what is registered in two places (tied weights) twice; Python's do not. `tensor_of` gives an entry's tensor.
template <typename Entry, typename TensorOf>
std::vector<Entry> distinct_tensors(std::vector<Entry> entries, const TensorOf& tensor_of) {
  std::unordered_set<const c10::TensorImpl*> known;
  std::erase_if(entries, [&](const Entry& entry) {
    const at::Tensor& tensor = tensor_of(entry);
    return !tensor.defined() || !known.insert(tensor.unsafeGetTensorImpl()).second;
  });
  return entries;
}

inline std::vector<at::Tensor> distinct_tensors(std::vector<at::Tensor> tensors) {
  return distinct_tensors(std::move(tensors), std::identity());
}

}  // namespace brimful
