#pragma once

namespace sim {

constexpr int kMaxDimensions = 8;

/// A tensor or filter, as it was described.
struct Tensor {
  int type = 0, dimensions = 0;
  int sizes[kMaxDimensions] = {}, strides[kMaxDimensions] = {};

  /// Strides may be null: those of a dense tensor.
  void set(int of_type, int with_dimensions, const int* with_sizes, const int* with_strides) {
    type = of_type;
    dimensions = with_dimensions;
    int dense = 1;
    for (int k = dimensions - 1; k >= 0; --k) {
      sizes[k] = with_sizes[k];
      strides[k] = with_strides == nullptr ? dense : with_strides[k];
      dense *= sizes[k];
    }
  }
};

}  // namespace sim
