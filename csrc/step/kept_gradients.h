#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace brimful {

/// Gradients of earlier steps, set aside while a step that adds to them fills new ones. Not thread-safe.
class BRIMFUL_API KeptGradients {
 public:
  /// Sets the gradients of `parameters` aside, which then have none. Those whose memory others see too (a bucket, which
  /// the step fills anew) are copied.
  /// @throws BatchTooLarge if the limit leaves no room for the copies; they are made beyond it then, so that nothing is
  /// lost
  void take(const std::vector<at::Tensor>& parameters);
  /// Adds them to the gradients that the step made. Does not wait for a device.
  void add();
  /// Puts them back, in place of what the step left.
  void give_back();
  /// Of what is set aside.
  int64_t bytes() const { return bytes_; }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;  ///< parameter and gradient
  int64_t bytes_ = 0;
};

}  // namespace brimful
