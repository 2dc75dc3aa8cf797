// Where the ranks are, for other threads to ask.
#include <algorithm>

#include "pipeline/executor/executor_impl.h"

namespace brimful::pipeline {

void Executor::Impl::begin_job(Job job) {
  const std::lock_guard lock(job_mutex_);
  for (auto& place : places_) {
    place.done.store(0, std::memory_order_relaxed);
    place.began_ns.store(0, std::memory_order_relaxed);
    place.waits.store(false, std::memory_order_relaxed);
  }
  job_ = std::move(job);
  job_.is_on = true;
}

void Executor::Impl::end_job() {
  const std::lock_guard lock(job_mutex_);
  job_ = {};
}

std::vector<RankProgress> Executor::Impl::progress() const {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const std::lock_guard lock(job_mutex_);
  std::vector<RankProgress> result;
  for (int i = 0; job_.is_on && i < ranks(); ++i) {
    const auto& place = places_[i];
    RankProgress own;
    own.rank = placed_.first_rank() + i;
    const auto& order = job_.schedule.ranks[own.rank];
    own.actions = std::ssize(order);
    own.done = place.done.load(std::memory_order_relaxed);
    if (own.done < own.actions) {
      own.action = order[own.done];
      own.waits = place.waits.load(std::memory_order_relaxed);
      const auto began_ns = place.began_ns.load(std::memory_order_relaxed);
      const std::chrono::duration<double> since = now - std::chrono::nanoseconds(began_ns);
      own.seconds = began_ns > 0 ? std::max(0.0, since.count()) : 0;
    }
    result.push_back(own);
  }
  return result;
}

std::vector<RankProgress> Executor::progress() const {
  return impl_->progress();
}

}  // namespace brimful::pipeline
