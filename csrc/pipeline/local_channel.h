#pragma once
#include <brimful/pipeline/channel.h>

#include <atomic>
#include <memory>

#include "pipeline/bell.h"

namespace brimful::pipeline {

/// Between two stages of one process: a place for each microbatch. How many are filled at once is the schedule's doing.
class LocalChannel : public Channel {
 public:
  /// `receiver`: where the receiving rank waits; `cancelled`: ends that wait. Both outlive the channel.
  LocalChannel(Bell& receiver, const std::atomic<bool>& cancelled)
      : receiver_(receiver), cancelled_(cancelled) {}

  void send(int microbatch, Message message) override {
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
    return std::move(place.message);
  }

  void reset(int microbatches) override {
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
  std::unique_ptr<Place[]> places_;
  int count_ = 0;
};

}  // namespace brimful::pipeline
