#include "reducer/device_clock.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>

namespace brimful {

c10::Stream DeviceClock::current_stream() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

void DeviceClock::guarded(const std::function<void()>& action) {
  if (lost_) {
    return;
  }
  try {
    action();
  } catch (const std::exception&) {
    lost_ = true;
  }
}

void DeviceClock::mark(Point& point, c10::Stream stream) const {
  if (!point.event) {
    point.event.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // with times
  }
  point.event->record(stream);
  point.set = true;
}

void DeviceClock::begin_step() {
  lost_ = false;
  begin_.set = work_.set = end_.set = false;
  buckets_ = 0;
  guarded([&] { mark(begin_, current_stream()); });
}

void DeviceClock::end_work() {
  guarded([&] { mark(work_, current_stream()); });
}

void DeviceClock::begin_backward(size_t buckets) {
  buckets_ = buckets;
  points_.resize(std::max(points_.size(), buckets));
  for (auto& points : points_) {
    points.launch.set = points.done.set = false;
  }
}

void DeviceClock::launch(size_t bucket, c10::Device device) {
  if (device == device_) {
    guarded([&] { mark(points_.at(bucket).launch, current_stream()); });
  }
}

bool DeviceClock::launched(size_t bucket, c10::Device device, c10d::Work& work) {
  if (!in_streams_ || device != device_) {
    return in_streams_;
  }
  guarded([&] {
    if (!side_) {
      side_ = c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_);
    }
    const c10::StreamGuard guard(*side_);
    work.synchronize();
    mark(points_.at(bucket).done, *side_);
  });
  return true;
}

void DeviceClock::end_step() {
  guarded([&] {
    const auto current = current_stream();
    for (size_t i = buckets_; i > 0; --i) {
      if (points_[i - 1].done.set) {
        points_[i - 1].done.event->block(current);  // the side stream came to the others before
        break;
      }
    }
    mark(end_, current);
  });
}

bool DeviceClock::passed(const Point& point) const {
  return !point.set || point.event->query();
}

std::optional<double> DeviceClock::since_begin(const Point& point) const {
  return point.set ? std::optional(begin_.event->elapsedTime(*point.event)) : std::nullopt;
}

std::optional<DeviceClock::Times> DeviceClock::read() const {
  if (lost_ || !begin_.set || !end_.set) {
    return std::nullopt;
  }
  try {
    const auto last = points_.begin() + static_cast<std::ptrdiff_t>(buckets_);
    // Not so if the step began, or launched a bucket, in a stream that the others did not wait for.
    const bool known = passed(begin_) && passed(work_) && passed(end_) &&
                       std::all_of(points_.begin(), last,
                                   [&](const Points& points) {
                                     return passed(points.launch) && passed(points.done);
                                   }) &&
                       *since_begin(end_) >= 0;
    const auto ms = [&](const Point& point) {
      return known || !point.set ? since_begin(point) : Times::kUnknown;
    };
    Times times;
    times.total_ms = *ms(end_);
    times.work_ms = ms(work_);
    for (auto points = points_.begin(); points != last; ++points) {
      times.buckets.push_back({ms(points->launch), ms(points->done)});
    }
    return times;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace brimful
