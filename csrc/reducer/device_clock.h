#pragma once
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

namespace brimful {

/// When a device came to points of a step. Its events are made once and read at the step's end, behind the one host wait
/// of a step: nothing here waits for the device. A device that is lost has no times; it throws elsewhere. Events cost the
/// host calls: it takes the times of the first steps, and of one step in so many from then on.
class DeviceClock {
 public:
  /// `collectives_in_streams`: a collective's wait() makes the current stream wait, and not the host.
  DeviceClock(c10::Device device, bool collectives_in_streams)
      : device_(device), in_streams_(collectives_in_streams) {}

  static constexpr int64_t kFirstSteps = 10;
  static constexpr int64_t kOneIn = 16;

  void begin_step();
  /// All that this rank has to do itself has been enqueued.
  void end_work();
  void begin_backward(size_t buckets);
  /// Before the bucket's collective is called, in the stream that made its gradients.
  void launch(size_t bucket, c10::Device device);
  /// Notes the collective's end in a stream that waits for nothing else. False where the host has to.
  bool launched(size_t bucket, c10::Device device, c10d::Work& work);
  /// Behind all waits: what the host then waits for in the current stream comes after all events.
  void end_step();

  /// Since begin_step; nothing where the host has to say it.
  struct Bucket {
    std::optional<double> launch_ms;
    std::optional<double> done_ms;
  };
  struct Times {
    /// All of them, where the events are not ordered as the step is.
    static constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
    double total_ms = 0;
    std::optional<double> work_ms;
    std::vector<Bucket> buckets;
  };
  /// The last step that was timed has ended on the device, or none was.
  bool has_passed() const;
  /// That step's, once has_passed(). Nothing if it has none.
  std::optional<Times> read() const;
  /// It is read later: until then no other step is timed.
  void keep(bool kept) { kept_ = kept; }

 private:
  /// An event of the pool, and whether it belongs to this step.
  struct Point {
    std::optional<c10::Event> event;
    bool set = false;
  };
  struct Points {
    Point launch;
    Point done;
  };
  c10::Stream current_stream() const;
  void mark(Point& point, c10::Stream stream) const;
  std::optional<double> since_begin(const Point& point) const;
  Times times() const;
  Times no_times() const;
  void guarded(const std::function<void()>& action);

  c10::Device device_;
  bool in_streams_;
  int64_t steps_ = 0;
  bool on_ = false;     ///< in this step, whose device is not lost so far
  bool timed_ = false;  ///< the points are of a step that has ended
  bool kept_ = false;
  std::optional<c10::Stream> side_;
  Point begin_;
  Point work_;
  Point end_;
  std::vector<Points> points_;
  size_t buckets_ = 0;
};

}  // namespace brimful
