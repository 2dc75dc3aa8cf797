#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/step/late_sums.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>

#include "memory/host_tensor.h"
#include "step/piece_sums.h"

namespace brimful {

/// The total weights of steps that a device may still be computing.
class LateTotals {
 public:
  /// Of step `step`, on whose device `total` is `sums`'. `doubtful` (0-dim, bool, there; may be undefined): its gradient cannot be
  /// relied on.
  void note(int64_t step, std::shared_ptr<const LateSums> sums, const at::Tensor& total,
            const at::Tensor& doubtful);
  /// The last step's is known to the host.
  void forget_last() { last_ = {}; }
  /// What the next step's losses are divided by: the last one's total, on its device; where that is known to the host, `known`.
  Divisor ref_or(double known) const;
  /// The last step's. Waits for the device.
  std::optional<double> last() const;
  /// Looks at those that have come. Does not wait.
  /// @throws c10::ValueError if one of them is no number to divide by, or its step is doubtful
  void check();

 private:
  struct Pending {
    int64_t step = 0;
    std::shared_ptr<const LateSums> sums;
    std::optional<memory::ValuesOnHost> doubtful;
  };
  struct Last {
    int64_t step = 0;
    std::shared_ptr<const LateSums> sums = nullptr;
    at::Tensor ref = {};
  };
  std::deque<Pending> pending_;
  Last last_;
};

}  // namespace brimful
