#pragma once
#include <brimful/reducer/step_times.h>
#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "reducer/device_clock.h"

namespace brimful {

/// Takes a step's times. A clock read for each gradient and a few for each bucket; no allocation for a gradient.
class Stopwatch {
 public:
  using Clock = std::chrono::steady_clock;

  /// `collectives_in_streams`: see DeviceClock.
  void set_device(c10::Device device, bool collectives_in_streams) {
    if (!device.is_cpu()) {
      device_.emplace(device, collectives_in_streams);
    }
  }
  /// `agreeing_ms`, here and below: for how long the group's reducers have waited so far for other ranks to agree.
  void begin_step(double agreeing_ms);
  /// Of the backward in which buckets are launched.
  void begin_backward(size_t buckets);
  /// A gradient of the bucket came; returns the time for end_copy.
  Clock::time_point gradient(int64_t bucket);
  void end_copy(Clock::time_point begin) { copy_ += Clock::now() - begin; }
  void ready(int64_t bucket) { times_.buckets.at(bucket).ready_ms = now_ms(); }
  void launch(int64_t bucket, c10::Device device);
  /// After the call of the bucket's collective.
  void launched(int64_t bucket, c10::Device device, const c10::intrusive_ptr<c10d::Work>& work,
                int64_t bytes, int64_t parameters);
  /// This rank's own part of the step is done, or on a device enqueued. Returns how long it took without waiting for others;
  /// on a device that of the step before, if there was one, or NaN where the device does not know.
  double end_work(double agreeing_ms);
  /// A wait of two parts begins once.
  void begin_wait() {
    if (!std::exchange(waits_, true)) {
      wait_begin_ = Clock::now();
    }
  }
  /// The bucket's collective has ended.
  void waited(int64_t bucket);
  /// All have, and the current stream waits for them.
  void end_wait();
  void end_step(int64_t step, const std::vector<float>& ms_by_rank, double agreeing_ms);
  double now_ms() const { return ms_since(begin_); }
  /// From the first gradient of the last backward to the end of the step, of the last step.
  double span_ms() const { return span_ms_; }

  /// Of a step that ended before its device did, if that has ended it now. Waits for nothing.
  void take_late_times();
  std::vector<StepTimes> steps() const { return {kept_.begin(), kept_.end()}; }
  const StepTimes& last_step() const { return kept_.back(); }
  bool has_steps() const { return !kept_.empty(); }
  /// Whether the last step's times of buckets are: a device may not know its own.
  bool last_is_known() const { return known_; }

 private:
  static double ms_since(Clock::time_point begin) {
    return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  }
  /// `begin_ms`: of the device's step on the host's axis.
  void take_device_times(const DeviceClock::Times& device, double begin_ms, double agreeing_ms);
  /// Written by the process group's threads.
  using Done = std::vector<std::atomic<double>>;

  Clock::time_point begin_ = Clock::now();
  Clock::time_point backward_begin_ = begin_;
  Clock::time_point wait_begin_ = begin_;
  Clock::duration copy_{};
  double agreeing_before_ms_ = 0;
  bool in_backward_ = false;
  bool waits_ = false;
  double span_ms_ = 0;
  StepTimes times_;
  std::shared_ptr<Done> done_;
  std::optional<DeviceClock> device_;  ///< nothing on the CPU
  struct Late {
    int64_t step = 0;
    double agreeing_ms = 0;
  };
  std::optional<Late> late_;              ///< a step whose device has not ended it yet
  std::optional<double> device_work_ms_;  ///< of the last step that is known
  bool known_ = true;
  std::deque<StepTimes> kept_;
};

}  // namespace brimful
