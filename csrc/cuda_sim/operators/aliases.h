#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace sim_operators {

/// The CUDA tensors of one call as CPU tensors on the same memory.
class Aliases {
 public:
  /// The same tensor gives the same alias, tensors that share memory give aliases that do.
  at::Tensor operator()(const at::Tensor& cuda);
  /// What the operator resized (out=) gets its size and values on the device too.
  void write_back();
  /// The CUDA tensor for what the operator returned: one that it was given, a view of one, or a new one.
  at::Tensor result(const at::Tensor& cpu, c10::Device device);

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
  std::map<c10::StorageImpl*, std::optional<c10::Storage>> storages_;
};

}  // namespace sim_operators
