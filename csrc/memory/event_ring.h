#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace brimful::memory {

/// A birth, a death, or the end of a step. A death has all of its block too: its birth may be lost.
struct Event {
  enum Kind : uint32_t { kBirth, kDeath, kStep };

  int64_t time_ns;  // of the steady clock
  const void* data;
  int64_t bytes;
  int64_t used_bytes;  // at a birth: what the device has in use, with it
  uint32_t birth;      // the block's number, its lower bits
  uint32_t step;       // of the block's birth; of a step: the one that begins
  uint32_t site : 24;
  uint32_t category : 8;  // of the block's CategoryScope
  uint32_t module : 24;
  uint32_t phase : 2;
  uint32_t kind : 2;
  uint32_t temporary : 1;  // died in the phase in which it was born
};
static_assert(sizeof(Event) == 48);

/// The newest events of a device. Takes all of its memory when it is made, and the system's pages as it fills.
class EventRing {
 public:
  /// @throws std::bad_alloc
  explicit EventRing(size_t capacity)
      : events_(std::make_unique_for_overwrite<Event[]>(capacity)), capacity_(capacity) {}

  void add(const Event& event) {
    events_[next_] = event;
    next_ = next_ + 1 == capacity_ ? 0 : next_ + 1;
    ++added_;
  }

  size_t size() const { return added_ < capacity_ ? added_ : capacity_; }
  /// How many older ones had to make room.
  size_t lost() const { return added_ - size(); }
  /// The oldest first.
  const Event& operator[](size_t index) const {
    const size_t first = added_ < capacity_ ? 0 : next_;
    return events_[first + index < capacity_ ? first + index : first + index - capacity_];
  }

 private:
  std::unique_ptr<Event[]> events_;
  size_t capacity_;
  size_t next_ = 0;
  size_t added_ = 0;
};

}  // namespace brimful::memory
