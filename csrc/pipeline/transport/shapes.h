#pragma once
#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace brimful::pipeline {

/// What an error says of tensors, without keeping them.
class Shapes {
 public:
  Shapes() = default;
  explicit Shapes(const std::vector<at::Tensor>& tensors);
  bool empty() const { return shapes_.empty(); }
  /// "[8, 64] Float, [8] Long"
  std::string to_string() const;

 private:
  struct Shape {
    at::DimVector sizes;
    at::ScalarType dtype;
  };
  std::vector<std::optional<Shape>> shapes_;  ///< nothing: the tensor is not defined
};

}  // namespace brimful::pipeline
