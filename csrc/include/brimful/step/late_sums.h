#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>
#include <c10/core/Event.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace brimful {

/// What ranks' losses and weights sum to in a step that a device may still be computing, on its way to the host. From any
/// thread.
class BRIMFUL_API LateSums {
 public:
  /// `by_rank` (ranks x 2, float64, on a device): a rank's sum of losses times weights, and its weight, which is 0 where the
  /// rank knows it. `known_weight`: of all that do. `weight_is_late`: one does not. Does not wait.
  LateSums(at::Tensor by_rank, double known_weight, bool weight_is_late);

  bool weight_is_late() const { return weight_is_late_; }
  /// The weight of all ranks: 0-dim, float64, on the device.
  at::Tensor device_weight() const;
  /// The device has come so far. Does not wait.
  bool have_come() const;

  /// By rank. Waits for the device the first time.
  std::vector<double> losses() const;
  /// Of all ranks. Waits as losses() where it is late.
  double weight() const;
  /// Weighted over all ranks; 0 unless their weight is above 0. Waits as losses().
  double mean_loss() const;

 private:
  const std::vector<double>& values() const;

  at::Tensor by_rank_;
  double known_weight_;
  bool weight_is_late_;
  c10::Event arrived_;
  mutable std::mutex mutex_;
  mutable at::Tensor host_;  ///< undefined once it is read
  mutable std::vector<double> values_;
};

/// A double, which waits for the device the first time that it is asked for its value, if the step has ended before the
/// device. From any thread.
class BRIMFUL_API LateNumber {
 public:
  using Read = double (LateSums::*)() const;

  LateNumber(double value = 0) : value_(value) {}
  /// One of `sums`.
  LateNumber(std::shared_ptr<const LateSums> sums, Read read)
      : sums_(std::move(sums)), read_(read) {}
  double value() const { return sums_ ? (*sums_.*read_)() : value_; }
  operator double() const { return value(); }

 private:
  double value_ = 0;
  std::shared_ptr<const LateSums> sums_;
  Read read_ = nullptr;
};

}  // namespace brimful
