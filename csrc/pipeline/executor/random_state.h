#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <utility>

namespace brimful::pipeline {

/// Where a device's default generator is in its numbers. The CPU's is copied without an allocation.
class RandomState {
 public:
  static RandomState of(c10::Device device);
  /// As after manual_seed(), without what that does to other devices.
  static void seed(c10::Device device, uint64_t seed);
  void put(c10::Device device) const;
  /// A number that another state would hardly give.
  uint64_t number() const;
  /// The caller's next numbers are others, as if one had been drawn.
  static void advance(c10::Device device);

  bool operator==(const RandomState& other) const;
  /// Whether the generator still is where this was read. A short look, after which it has made other numbers or none.
  bool still_of(c10::Device device) const;

 private:
  at::mt19937 engine_;
  std::optional<float> next_float_;
  std::optional<double> next_double_;
  at::Tensor bytes_;                     ///< of another device than the CPU
  std::pair<uint64_t, uint64_t> place_;  ///< of such a generator: its seed and offset
};

/// The numbers after a number that share no pattern with it, or with those of its neighbours.
uint64_t mixed(uint64_t number, uint64_t with);

}  // namespace brimful::pipeline
