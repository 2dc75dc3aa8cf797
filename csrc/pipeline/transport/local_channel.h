#pragma once
#include "pipeline/transport/channel.h"

#include <atomic>
#include <memory>
#include <optional>

#include "pipeline/transport/bell.h"
#include "pipeline/transport/copy_lane.h"

namespace brimful::pipeline {

/// Between two stages of one process: a place for each microbatch. How many are filled at once is the schedule's doing.
class LocalChannel : public Channel {
 public:
  /// `receiver`: where the receiving rank waits; `cancelled`: ends that wait. Both outlive the channel. `lane`: between
  /// ranks on different devices.
  LocalChannel(Bell& receiver, const std::atomic<bool>& cancelled, std::optional<CopyLane> lane)
      : receiver_(receiver), cancelled_(cancelled), lane_(std::move(lane)) {}

  void send(int microbatch, Message message) override {
    if (lane_) {
      lane_->depart(message);
    }
    auto& place = places_[microbatch];
    place.message = std::move(message);
    place.full.store(true, std::memory_order_release);
    receiver_.ring();
  }

  Message receive(int microbatch) override {
    auto& place = places_[microbatch];
    receiver_.wait_until([&] {
      return place.full.load(std::memory_order_acquire) ||
             cancelled_.load(std::memory_order_relaxed);
    });
    if (!place.full.load(std::memory_order_acquire)) {
      throw Cancelled();
    }
    place.full.store(false, std::memory_order_relaxed);
    auto message = std::move(place.message);
    if (lane_) {
      lane_->arrive(message);
    }
    return message;
  }

  void reset(int microbatches, int64_t /*rows*/) override {
    if (microbatches != count_) {
      places_ = std::make_unique<Place[]>(microbatches);
      count_ = microbatches;
    }
    for (int i = 0; i < count_; ++i) {
      places_[i].full.store(false, std::memory_order_relaxed);
      places_[i].message = {};
    }
  }

 private:
  struct Place {
    std::atomic<bool> full{false};
    Message message;
  };
  Bell& receiver_;
  const std::atomic<bool>& cancelled_;
  std::optional<CopyLane> lane_;
  std::unique_ptr<Place[]> places_;
  int count_ = 0;
};

}  // namespace brimful::pipeline
