#pragma once
#include <atomic>

namespace brimful::pipeline {

/// What progress() says between calls.
inline constexpr const char* kIdle = "no call is under way";

/// Ends what a call says that it is doing.
class Doing {
 public:
  Doing(std::atomic<const char*>& doing, std::atomic<bool>& cancelled) : doing_(doing) {
    cancelled = false;
    doing_ = "a call begins";
  }
  ~Doing() { doing_ = kIdle; }
  Doing(const Doing&) = delete;
  Doing& operator=(const Doing&) = delete;

 private:
  std::atomic<const char*>& doing_;
};

}  // namespace brimful::pipeline
