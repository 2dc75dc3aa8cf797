#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>
#include <c10/core/Event.h>

#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace brimful {

/// The losses of a step that a device may still be computing, on their way to the host.
class BRIMFUL_API LateLosses {
 public:
  /// Makes of values on the host a sum of losses for each rank.
  using Read = std::function<std::vector<double>(const at::Tensor&)>;

  /// `values`: on a device; copied behind what its current stream has to do. Does not wait.
  LateLosses(const at::Tensor& values, Read read);
  /// By rank. Waits for the device the first time. From any thread.
  const std::vector<double>& sums();

 private:
  std::mutex mutex_;
  at::Tensor host_;  ///< undefined once it is read
  c10::Event arrived_;
  Read read_;
  std::vector<double> sums_;
};

/// A mean loss. It is a double, which waits for the device the first time that it is asked for its value, if the step has ended
/// before the device. From any thread.
class BRIMFUL_API MeanLoss {
 public:
  MeanLoss(double value = 0) : value_(value) {}
  /// `weight`: of all ranks.
  MeanLoss(std::shared_ptr<LateLosses> sums, double weight)
      : value_(weight), sums_(std::move(sums)) {}
  double value() const;
  operator double() const { return value(); }

 private:
  double value_ = 0;  ///< or the weight
  std::shared_ptr<LateLosses> sums_;
};

}  // namespace brimful
