#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace sim_values {

/// Where the values of a tensor of a device lie. It holds no tensor: torch decides by how many hold one.
struct Place {
  void* begin;
  size_t bytes;  // from the first value to the last, with what lies between
  at::ScalarType type;

  bool is_known() const;
  /// Whether they may be kept: not too many, and floating-point numbers only where there are few.
  bool may_be_known() const;
  /// Nothing is known of it any more.
  void forget() const;
};

/// A place, and how the values lie in it.
struct Layout {
  Place place;
  std::vector<int64_t> sizes, strides;

  explicit Layout(const Place& place, const at::Tensor& tensor);
  /// The values themselves, as a tensor of the host.
  at::Tensor values() const;
  /// Makes these its values; if they may not be known, nothing is known of it any more.
  void set(const at::Tensor& values) const;
};

/// None for a tensor that is not dense, not of a device, or has no memory.
std::optional<Place> place_of(const at::Tensor& tensor);
/// Whether a tensor stands for others: those of functorch, subclasses with tensors of their own, fake ones.
bool stands_for_others(const at::Tensor& tensor);

}  // namespace sim_values
