#pragma once
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "sharded/collective_call.h"

namespace brimful {

/// The sizes of an attempt's sized collectives, as this rank's pieces have begun them. Thread-safe.
class IssuedSizes {
 public:
  struct Known {
    int64_t index;  ///< of the call in the attempt
    CallSizes sizes;
  };

  /// Forgets the attempt before.
  void begin(int64_t attempt);
  /// The attempt's call with this number begins; numbers rise. Once room has been made for an attempt's calls, allocates nothing.
  void add(int64_t index, const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments);
  /// No further piece makes a call; calls from `end` on are not begun.
  void close(int64_t end);
  /// Whoever waits gets nothing any more.
  void stop();
  bool is_stopped() const;

  /// The attempt's sized call number `nth` of those that are begun. Waits for it; nothing once the attempt is closed and has
  /// no such call, or is over.
  std::optional<Known> wait_for(int64_t attempt, size_t nth);
  /// Where a closed attempt ended; -1 if it is over.
  int64_t end_of(int64_t attempt) const;

 private:
  struct Place {
    int64_t index;
    size_t begin;  ///< in `sizes_`
  };

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t attempt_ = -1;
  int64_t end_ = -1;  ///< -1: its pieces are not over
  bool stopped_ = false;
  std::vector<Place> places_;
  CallSizes sizes_;  ///< of all of them
};

}  // namespace brimful
