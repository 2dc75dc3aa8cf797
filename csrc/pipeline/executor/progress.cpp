// What a step that is under way is doing, for other threads to ask.
#include <brimful/pipeline/schedule_text.h>

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "pipeline/executor/executor_impl.h"
#include "pipeline/failure.h"
#include "pipeline/pipeline_state.h"

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
    own.rank = first_rank() + i;
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

PipelineProgress Pipeline::progress() const {
  return {state_->doing.load(std::memory_order_acquire), state_->executor->progress()};
}

std::string to_string(const PipelineProgress& progress) {
  std::ostringstream text;
  text << progress.doing;
  for (const auto& rank : progress.ranks) {
    text << "\n  rank " << rank.rank << ": ";
    if (rank.done == rank.actions) {
      text << "done with its " << rank.actions << " actions";
      continue;
    }
    text << "action " << rank.done + 1 << " of " << rank.actions << ", " << to_text(rank.action)
         << " (" << words_for(rank.action.kind) << " of microbatch " << rank.action.microbatch
         << " in stage " << rank.action.stage << ")"
         << (rank.waits ? ", waits for its message" : "");
    if (rank.seconds > 0) {
      text << ", for " << std::fixed << std::setprecision(1) << rank.seconds << " s";
    }
  }
  return text.str();
}

}  // namespace brimful::pipeline
