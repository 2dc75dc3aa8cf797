#include "stream.h"

#include <algorithm>
#include <thread>

#include "settings.h"

namespace {

thread_local bool of_stream = false;

}  // namespace

namespace sim {

bool is_stream_thread() {
  return of_stream;
}

void Mark::set(Clock::duration ahead) {
  const std::lock_guard lock(mutex_);
  done_ = true;
  ahead_ = ahead;
  time_ = Clock::now() + ahead;
  changed_.notify_all();
}

void Mark::wait() {
  if (!is_done()) {
    stream_->release();
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_; });
}

bool Mark::is_done() {
  const std::lock_guard lock(mutex_);
  return done_;
}

Clock::time_point Mark::time() {
  const std::lock_guard lock(mutex_);
  return time_;
}

Clock::duration Mark::ahead() {
  const std::lock_guard lock(mutex_);
  return ahead_;
}

}  // namespace sim

void CUstream_st::enqueue(std::function<void()> work, sim::When when) {
  if (when == sim::When::in_call && !defers()) {
    work();
    return;
  }
  const std::lock_guard lock(mutex_);
  const std::chrono::microseconds delay(std::max(sim::delay_us().load(), 0L));
  const auto start = sim::Clock::now() + delay;
  queue_.emplace_back(start, std::move(work));
  if (!std::exchange(started_, true)) {
    std::thread([this] { run(); }).detach();
  }
  changed_.notify_all();
}

void CUstream_st::synchronize() {
  release();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty() && !busy_; });
}

void CUstream_st::hold() {
  const std::lock_guard lock(mutex_);
  held_ = true;
}

void CUstream_st::release() {
  const std::lock_guard lock(mutex_);
  held_ = false;
  changed_.notify_all();
}

bool CUstream_st::defers() {
  const std::lock_guard lock(mutex_);
  return sim::delay_us() >= 0 || held_ || busy_ || !queue_.empty();
}

bool CUstream_st::idle() {
  const std::lock_guard lock(mutex_);
  return queue_.empty() && !busy_;
}

// Never ends: a destroyed stream's thread stays with its empty queue.
void CUstream_st::run() {
  of_stream = true;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !queue_.empty() && !held_; });
    auto [start, work] = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    std::this_thread::sleep_until(start);
    work();
    work = nullptr;  // what it holds goes before the stream is seen to be idle
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

std::shared_ptr<sim::Mark> CUevent_st::latest() {
  const std::lock_guard lock(mutex_);
  return mark_;
}

std::shared_ptr<sim::Mark> CUevent_st::renew(CUstream_st* stream) {
  const std::lock_guard lock(mutex_);
  return mark_ = std::make_shared<sim::Mark>(stream);
}
