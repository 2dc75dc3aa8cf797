#include "pipeline/transport/lane_watch.h"

#include <brimful/error.h>
#include <brimful/log.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <condition_variable>

namespace brimful::pipeline {
namespace {
constexpr std::chrono::milliseconds kLookEvery{20};
constexpr std::chrono::milliseconds kAskEvery{500};  // where a lane has waited for so long

}  // namespace

void LaneWatch::set(std::vector<DeviceLane*> lanes, const std::string& prefix) {
  const std::lock_guard lock(mutex_);
  lanes_ = std::move(lanes);
  board_.emplace(store_, prefix);
  given_up_.clear();
}

std::jthread LaneWatch::look_after() {
  return std::jthread([this](const std::stop_token& ended) {
    std::mutex mutex;
    std::condition_variable_any end;
    std::unique_lock lock(mutex);
    while (!end.wait_for(lock, ended, kLookEvery, [&] { return ended.stop_requested(); })) {
      look();
    }
  });
}

void LaneWatch::look() {
  const std::lock_guard lock(mutex_);
  look_here();
}

void LaneWatch::look_here() {
  if (!given_up_.empty()) {
    return;
  }
  for (auto* const lane : lanes_) {
    given_up_ = given_up_.empty() ? lane->trouble() : given_up_;
  }
  if (!given_up_.empty()) {
    post();
  } else if (another_gave_up()) {
    given_up_ = "another rank has given up the connections between their devices";
  }
  if (!given_up_.empty()) {
    log(LogLevel::warning, "messages between the devices of a pipeline are given up: " + given_up_);
    abort();
  }
}

bool LaneWatch::another_gave_up() {
  const auto now = std::chrono::steady_clock::now();
  const bool waits = std::any_of(lanes_.begin(), lanes_.end(), [&](DeviceLane* lane) {
    return now - lane->waits_since() > kAskEvery;
  });
  return waits && board_->given_up(FailureBoard::Patience(0), kAskEvery);
}

void LaneWatch::post() {
  Failure why;
  why.text = given_up_;
  try {
    board_->give_up(why, FailureBoard::Patience(0));
  } catch (const std::exception&) {  // the store is gone: there is no rank to inform
  }
}

// First those that are the trouble: what else is under way may arrive yet.
void LaneWatch::abort() noexcept {
  std::stable_partition(lanes_.begin(), lanes_.end(),
                        [](DeviceLane* lane) { return !lane->trouble().empty(); });
  for (auto* const lane : lanes_) {
    if (!lane->abort()) {
      lost_kept_ = true;
    }
  }
}

void LaneWatch::keep() {
  const std::lock_guard lock(mutex_);
  for (auto* const lane : lanes_) {
    lane->keep();
  }
}

void LaneWatch::drop() noexcept {
  const std::lock_guard lock(mutex_);
  abort();
  lanes_.clear();
  given_up_.clear();
}

std::string LaneWatch::given_up() {
  const std::lock_guard lock(mutex_);
  look_here();
  return given_up_;
}

void LaneWatch::await_arrival() {
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      look_here();
      if (!given_up_.empty()) {
        brimful::detail::throw_rank_failed(-1, -1, Status::error, given_up_);
      }
      if (std::all_of(lanes_.begin(), lanes_.end(),
                      [](DeviceLane* lane) { return lane->has_arrived(); })) {
        return;
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace brimful::pipeline
