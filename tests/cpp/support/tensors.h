#pragma once
#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

namespace brimful::test {

/// Numbers without a random generator, which ranks in threads would share.
inline at::Tensor filled(at::IntArrayRef sizes, double salt, c10::ScalarType dtype = at::kFloat) {
  const auto numel = c10::multiply_integers(sizes);
  return at::sin(at::arange(1, numel + 1, at::kDouble) * 1.7 + salt)
      .mul(0.5)
      .to(dtype)
      .reshape(sizes);
}

inline std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const auto& tensor : tensors) {
    result.push_back(tensor.detach().clone());
  }
  return result;
}

/// True if both are defined and bit-equal, or neither is defined.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || at::equal(a, b));
}

inline bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return same_bits(x, y); });
}

}  // namespace brimful::test
