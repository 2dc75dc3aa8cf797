#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>

#include <array>
#include <cstdint>

namespace brimful::detail {

constexpr int64_t kProjections = 16;

/// Random projections of all gradients of a backward, taken as they come, so that none has to stay. They are always the
/// same and linear: distances between sums of gradients are those between sums of their sketches, within a third or so.
class BRIMFUL_API GradientSketch {
 public:
  /// `parameter`: its number, the same in every run. Allocates a few MiB, beyond the memory limit.
  void add(int64_t parameter, const at::Tensor& gradient);
  /// Waits for the device.
  std::array<double, kProjections> values() const;
  /// Whether any gradient has come.
  bool is_empty() const { return !sums_.defined(); }

 private:
  void add_blocks(const at::Tensor& blocks, const at::Tensor& numbers);
  void add_dense(int64_t parameter, const at::Tensor& gradient);
  void add_sparse(int64_t parameter, const at::Tensor& gradient);

  at::Tensor sums_;  ///< float64
  at::Tensor
      matrix_;  ///< of +1 and -1, the same for each block of a gradient, whose sums get signs of their own
};

}  // namespace brimful::detail
