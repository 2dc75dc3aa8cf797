#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>

namespace sim_operators {

/// How many values from a tensor's first to its last, whether they are its own or lie between them.
inline int64_t span_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return 0;
  }
  int64_t span = 1;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    span += (tensor.size(i) - 1) * tensor.stride(i);
  }
  return span;
}

/// The value with each of its tensors changed: an argument or a result of an operator.
template <class Change>
c10::IValue changed(const c10::IValue& value, Change&& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& item : value.toTensorVector()) {
      list.push_back(change(item));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& item : value.toOptionalTensorVector()) {
      list.push_back(item ? std::optional(change(*item)) : std::nullopt);
    }
    return list;
  }
  return value;
}

}  // namespace sim_operators
