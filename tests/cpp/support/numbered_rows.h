#pragma once
#include <torch/data/datasets/base.h>
#include <torch/data/example.h>
#include "support/net.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

namespace brimful::test {

using Indices = std::vector<size_t>;

inline Indices sorted(Indices indices) {
  std::sort(indices.begin(), indices.end());
  return indices;
}

inline Indices up_to(size_t size) {
  Indices all(size);
  std::iota(all.begin(), all.end(), size_t{0});
  return all;
}

/// Sample i is a row of i, for a Net.
struct NumberedRows : torch::data::datasets::Dataset<NumberedRows> {
  explicit NumberedRows(size_t count) : count(count) {}
  torch::data::Example<> get(size_t index) override {
    return {at::full({Net::kInputs}, static_cast<double>(index)), at::zeros({1})};
  }
  std::optional<size_t> size() const override { return count; }
  size_t count;
};

}  // namespace brimful::test
