#include "reducer/stopwatch.h"

#include <brimful/reducer/step_times.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/chrome_trace.h"

namespace brimful {
namespace {
constexpr size_t kKeptSteps = 64;

/// Among the ranks that know their time.
void find_straggler(const std::vector<float>& ms_by_rank, StepTimes& times) {
  times.straggler = -1;
  float least = std::numeric_limits<float>::infinity();
  float most = -1;
  for (size_t rank = 0; rank < ms_by_rank.size(); ++rank) {
    if (ms_by_rank[rank] > most) {  // which NaN is not
      most = ms_by_rank[rank];
      times.straggler = static_cast<int>(rank);
    }
    least = std::fmin(least, ms_by_rank[rank]);
  }
  times.straggler_ms = times.straggler < 0 ? 0 : most - least;
}
}  // namespace

void Stopwatch::begin_step(double agreeing_ms) {
  take_late_times();
  begin_ = Clock::now();
  agreeing_before_ms_ = agreeing_ms;
  if (device_) {
    device_->begin_step();
  }
}

void Stopwatch::begin_backward(size_t buckets) {
  times_ = {};
  times_.begin_s = std::chrono::duration<double>(begin_.time_since_epoch()).count();
  times_.buckets.resize(buckets);
  done_ = std::make_shared<Done>(buckets);
  copy_ = {};
  in_backward_ = false;
  if (device_) {
    device_->begin_backward(buckets);
  }
}

Stopwatch::Clock::time_point Stopwatch::gradient(int64_t bucket) {
  const auto now = Clock::now();
  if (!in_backward_) {
    in_backward_ = true;
    backward_begin_ = now;
  }
  auto& first = times_.buckets.at(bucket).first_ms;
  if (first == 0) {
    first = std::chrono::duration<double, std::milli>(now - begin_).count();
  }
  return now;
}

void Stopwatch::launch(int64_t bucket, c10::Device device) {
  times_.buckets.at(bucket).launch_ms = now_ms();
  if (device_) {
    device_->launch(bucket, device);
  }
}

void Stopwatch::launched(int64_t bucket, c10::Device device,
                         const c10::intrusive_ptr<c10d::Work>& work, int64_t bytes,
                         int64_t parameters) {
  auto& times = times_.buckets.at(bucket);
  times.bytes = bytes;
  times.parameters = parameters;
  times_.bytes += bytes;
  times_.launch_ms += now_ms() - times.launch_ms;
  times_.backward_ms =
      in_backward_
          ? std::chrono::duration<double, std::milli>(Clock::now() - backward_begin_).count()
          : 0;
  if (!work || (device_ && device_->launched(bucket, device, *work))) {
    return;
  }
  try {
    work->getFuture()->addCallback([done = done_, bucket, begin = begin_](auto& /*future*/) {
      done->at(bucket) = ms_since(begin);
    });
  } catch (const std::exception&) {
    // This backend has no futures: waited() takes the time.
  }
}

void Stopwatch::waited(int64_t bucket) {
  if (!done_ || bucket >= std::ssize(*done_)) {
    return;  // the step died before its backward
  }
  auto& done = done_->at(bucket);
  if (done == 0) {
    done = now_ms();
  }
}

void Stopwatch::end_wait() {
  waits_ = false;
  if (device_) {
    device_->end_step();
  }
}

double Stopwatch::end_work(double agreeing_ms) {
  if (device_) {
    device_->end_work();
  }
  return device_work_ms_.value_or(now_ms() - (agreeing_ms - agreeing_before_ms_));
}

void Stopwatch::take_device_times(const DeviceClock::Times& device, double begin_ms,
                                  double agreeing_ms) {
  times_.by_device = true;
  for (size_t i = 0; i < times_.buckets.size(); ++i) {
    const auto& points = device.buckets.at(i);
    auto& bucket = times_.buckets[i];
    if (points.launch_ms) {
      const double launch_ms = begin_ms + *points.launch_ms;
      // A host that sees the last event late moves the device's times behind its own, which gloo's ends are.
      bucket.launch_ms = points.done_ms ? launch_ms : std::min(launch_ms, bucket.done_ms);
      bucket.ready_ms = bucket.launch_ms;
    }
    if (points.done_ms) {
      bucket.done_ms = begin_ms + *points.done_ms;
    }
  }
  if (device.work_ms) {
    device_work_ms_ = std::max(*device.work_ms - agreeing_ms, 0.0);  // NaN stays
  }
}

/// It begins on the device when it does on the host, or later.
void Stopwatch::take_late_times() {
  if (!late_ || !device_->has_passed()) {
    return;
  }
  const auto late = *std::exchange(late_, std::nullopt);
  const auto device = device_->read();
  device_->keep(false);
  const auto of_step = std::find_if(kept_.begin(), kept_.end(),
                                    [&](const auto& times) { return times.step == late.step; });
  if (device && of_step != kept_.end()) {
    std::swap(times_, *of_step);
    take_device_times(*device, 0, late.agreeing_ms);
    times_.total_ms = std::fmax(times_.total_ms, device->total_ms);
    std::swap(times_, *of_step);
  }
}

void Stopwatch::end_step(int64_t step, const std::vector<float>& ms_by_rank, double agreeing_ms) {
  agreeing_ms -= agreeing_before_ms_;
  times_.step = step;
  times_.copy_ms = std::chrono::duration<double, std::milli>(copy_).count();
  times_.wait_ms = ms_since(wait_begin_) + agreeing_ms;
  times_.total_ms = now_ms();
  span_ms_ = ms_since(in_backward_ ? backward_begin_ : wait_begin_);
  for (size_t i = 0; done_ && i < times_.buckets.size(); ++i) {
    times_.buckets[i].done_ms = (*done_)[i].load();
  }
  known_ = true;
  if (device_ && !late_ && !device_->has_passed()) {
    late_ = Late{step, agreeing_ms};
    device_->keep(true);
  } else if (const auto device = device_ && !late_ ? device_->read() : std::nullopt) {
    known_ = !std::isnan(device->total_ms);
    // What the host has just waited for is the last of the device's events.
    take_device_times(*device, times_.total_ms - device->total_ms, agreeing_ms);
  }
  find_straggler(ms_by_rank, times_);
  kept_.push_back(times_);
  if (kept_.size() > kKeptSteps) {
    kept_.pop_front();
  }
}

std::string to_chrome_trace(const std::vector<StepTimes>& steps, int rank) {
  ChromeTrace trace;
  trace.name_process(rank, "rank " + std::to_string(rank));
  trace.name_thread(rank, 0, "step");
  trace.name_thread(rank, 1, "gradients of a bucket");
  trace.name_thread(rank, 2, "collectives");
  for (const auto& step : steps) {
    const auto span = [&](const std::string& name, int row, double begin_ms, double end_ms,
                          ChromeTrace::Values values) {
      trace.slice(rank, row, name, "reducer", step.begin_s * 1e6 + begin_ms * 1e3,
                  std::max(0.0, end_ms - begin_ms) * 1e3, values);
    };
    const auto number = [](int64_t value) { return static_cast<double>(value); };
    span("step " + std::to_string(step.step), 0, 0, step.total_ms,
         {{"copy_ms", step.copy_ms},
          {"launch_ms", step.launch_ms},
          {"wait_ms", step.wait_ms},
          {"bytes", number(step.bytes)},
          {"straggler", number(step.straggler)},
          {"straggler_ms", step.straggler_ms}});
    for (size_t i = 0; i < step.buckets.size(); ++i) {
      const auto& bucket = step.buckets[i];
      const auto name = "bucket " + std::to_string(i);
      const ChromeTrace::Values about{{"bytes", number(bucket.bytes)},
                                      {"parameters", number(bucket.parameters)}};
      if (std::isnan(bucket.launch_ms)) {
        continue;
      }
      if (bucket.first_ms > 0) {
        span(name, 1, bucket.first_ms, bucket.ready_ms, about);
      }
      span(name, 2, bucket.launch_ms, bucket.done_ms, about);
    }
  }
  return trace.json();
}

}  // namespace brimful
