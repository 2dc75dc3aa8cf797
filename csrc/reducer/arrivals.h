#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "reducer/place.h"
#include "reducer/plan_tuner.h"
#include "reducer/stopwatch.h"

namespace brimful {

/// Gradients of a backward, as they come: each into its place, and those that come too late. Under the attempt's lock.
class Arrivals {
 public:
  /// An engine's, which outlive this.
  struct Parts {
    BucketSet& layout;
    const Attempt& attempt;
    Placement& placement;
    Stopwatch& watch;
    PlanTuner& tuner;
  };
  explicit Arrivals(const Parts& parts) : parts_(parts) {}

  /// A step begins; `managed`: a StepGroup's.
  void begin_step(bool managed);
  void begin_backward();
  /// Learns from this loss which backward the step runs. `self` is held weakly.
  static void watch(const at::Tensor& loss, std::weak_ptr<Arrivals> self);
  /// True: its bucket is full.
  /// @throws c10::Error if the bucket was launched
  bool take(int64_t parameter, const at::Tensor& gradient);

  /// A gradient has come after its bucket was launched.
  bool came_late() const { return came_late_; }
  /// One has come in another graph task than the step's: it may come again.
  bool may_come_again() const { return reentrant_; }
  /// Learned from gradients that came late: all buckets are launched after backward.
  bool launch_late() const { return launch_late_; }

 private:
  [[noreturn]] void throw_late(int64_t parameter);

  Parts parts_;
  int graph_task_ = -1;  ///< of the backward that a step runs
  bool came_late_ = false;
  bool reentrant_ = false;
  bool launch_late_ = false;
};

}  // namespace brimful
