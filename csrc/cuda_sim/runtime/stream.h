#pragma once
#include <driver_types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace sim {

using Clock = std::chrono::steady_clock;

/// What is waited for of an event: each record makes one, which the streams that wait for it share.
class Mark {
 public:
  explicit Mark(CUstream_st* stream) : stream_(stream) {}

  /// By the clock of its stream, which is this far ahead.
  void set(Clock::duration ahead);
  /// A stream that is held goes on.
  void wait();
  bool is_done();
  /// When it was set.
  Clock::time_point time();
  Clock::duration ahead();

 private:
  CUstream_st* const stream_;  // on which it was recorded; streams are never deleted
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  Clock::time_point time_;
  Clock::duration ahead_{};
};

enum class When {
  in_call,  // inside the call if nothing is before it and streams do not work behind the host's back
  by_thread  // in the stream's thread: it may wait
};

/// Whether this is the thread of a stream.
bool is_stream_thread();

}  // namespace sim

/// A queue of work that is done in order. Without SIM_CUDA_DELAY_US work is done inside the call that asks for it,
/// unless the stream waits; with it a thread starts each piece of work that much later, so that work which is not
/// ordered by events is seen to be unordered.
struct CUstream_st {
  CUstream_st(int of_device, int with_priority) : device(of_device), priority(with_priority) {}

  void enqueue(std::function<void()> work, sim::When when = sim::When::in_call);
  /// A stream that is held goes on.
  void synchronize();
  bool idle();
  /// From now on it starts nothing, until it is released or waited for.
  void hold();
  void release();
  /// Whether what is asked of it now is done behind the host's back.
  bool defers();

  const int device;
  const int priority;
  std::atomic<bool> capturing{false};
  /// Of its clock, by which events are timed, against the machine's: what its work was said to take. For its own work.
  std::atomic<sim::Clock::duration> ahead{sim::Clock::duration::zero()};

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<sim::Clock::time_point, std::function<void()>>> queue_;
  bool busy_ = false;
  bool started_ = false;
  bool held_ = false;
};

struct CUevent_st {
  explicit CUevent_st(unsigned with_flags) : flags(with_flags) {}

  std::shared_ptr<sim::Mark> latest();
  std::shared_ptr<sim::Mark> renew(CUstream_st* stream);

  const unsigned flags;

 private:
  std::mutex mutex_;
  std::shared_ptr<sim::Mark> mark_;
};
