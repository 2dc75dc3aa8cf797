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
  if (!on_) {
    return;
  }
  try {
    action();
  } catch (const std::exception&) {
    on_ = false;
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
  if (kept_) {
    on_ = false;
    return;
  }
  timed_ = false;
  on_ = steps_ < kFirstSteps || steps_ % kOneIn == 0;
  begin_.set = work_.set = end_.set = false;
  buckets_ = 0;
  guarded([&] { mark(begin_, current_stream()); });
}

void DeviceClock::end_work() {
  guarded([&] { mark(work_, current_stream()); });
}

void DeviceClock::begin_backward(size_t buckets) {
  if (kept_) {
    return;
  }
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
  ++steps_;
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
  timed_ = timed_ || on_;
  on_ = false;
}

bool DeviceClock::has_passed() const {
  try {
    return !timed_ || !end_.set || end_.event->query();
  } catch (const std::exception&) {  // the device is lost
    return true;
  }
}

std::optional<double> DeviceClock::since_begin(const Point& point) const {
  return point.set ? std::optional(begin_.event->elapsedTime(*point.event)) : std::nullopt;
}

DeviceClock::Times DeviceClock::times() const {
  Times times;
  times.total_ms = *since_begin(end_);
  times.work_ms = since_begin(work_);
  for (size_t i = 0; i < buckets_; ++i) {
    times.buckets.push_back({since_begin(points_[i].launch), since_begin(points_[i].done)});
  }
  return times;
}

DeviceClock::Times DeviceClock::no_times() const {
  const auto unknown = [](const Point& point) {
    return point.set ? std::optional(Times::kUnknown) : std::nullopt;
  };
  Times times;
  times.total_ms = Times::kUnknown;
  times.work_ms = unknown(work_);
  for (size_t i = 0; i < buckets_; ++i) {
    times.buckets.push_back({unknown(points_[i].launch), unknown(points_[i].done)});
  }
  return times;
}

std::optional<DeviceClock::Times> DeviceClock::read() const {
  if (!timed_ || !begin_.set || !end_.set) {
    return std::nullopt;
  }
  try {
    auto found = times();
    return found.total_ms >= 0 ? found : no_times();
  } catch (const std::exception&) {
    // One of them is still to come: the step began, or launched a bucket, in a stream that the others did not wait for. Or
    // the device is lost.
    try {
      return end_.event->query() ? std::optional(no_times()) : std::nullopt;
    } catch (const std::exception&) {
      return std::nullopt;
    }
  }
}

}  // namespace brimful
