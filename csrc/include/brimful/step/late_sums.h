#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>

#include <memory>
#include <utility>
#include <vector>

namespace brimful {

/// What ranks' losses and weights sum to in a step that a device may still be computing, on its way to the host. From any
/// thread.
class BRIMFUL_API LateSums {
 public:
  /// By rank, float64, on a device: `losses` times weights; `weights`, 0 where the rank knows its own (undefined: all
  /// do). `known_weight`: of those that do. Does not wait.
  LateSums(const at::Tensor& losses, const at::Tensor& weights, double known_weight);
  ~LateSums();
  LateSums(const LateSums&) = delete;
  LateSums& operator=(const LateSums&) = delete;

  /// The weight of all ranks: 0-dim, float64, on the device. Of one that is late.
  at::Tensor device_weight() const;
  /// Reads what has come; false if that is not all. Does not wait.
  bool take() const;

  /// By rank. Waits for the device the first time.
  const std::vector<double>& losses() const;
  /// Of all ranks. Waits as losses() where it is late.
  double weight() const;
  /// Weighted over all ranks; 0 unless their weight is above 0. Waits as losses().
  double mean_loss() const;

 private:
  class Column;

  std::unique_ptr<Column> losses_;
  std::unique_ptr<Column> weights_;  ///< null: all are known
  at::Tensor device_weights_;
  double known_weight_;
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
