#pragma once
#include <brimful/step/participant.h>

#include <atomic>
#include <cstdint>

#include "reducer/place.h"
#include "reducer/stopwatch.h"

namespace brimful {

/// Launches buckets in their order, after those of the participants before, and waits for them.
class Launcher {
 public:
  Launcher(GroupLink& link, BucketSet& layout, HookChain& hooks, Stopwatch& watch)
      : link_(link), layout_(layout), hooks_(hooks), watch_(watch) {}

  /// As ParticipantAttempt::set_order().
  void set_order(ParticipantAttempt* before, ParticipantAttempt* after) {
    before_ = before;
    after_ = after;
  }
  /// The bucket that is launched next; as many were launched.
  int64_t next() const { return next_; }
  /// Buckets that fill in backward were launched.
  bool launched_early() const { return next_ >= layout_.last() && hooks_.is_done(); }
  /// It is the next bucket's turn in backward.
  bool may_launch_early() const;
  /// Lets the participant after this one go on.
  void advance_after() const;

  /// The next bucket, as it was filled. `sends`: the ranks are in one step, else nothing leaves.
  void launch(const Scales& scales, int64_t step, bool sends);
  /// With what this rank can give without its gradients.
  void launch_drained(Fill fill, int64_t step, bool sends);
  /// The one host wait of a step.
  void wait_for_all();
  /// Makes the current stream wait for all, and not the host. Returns the work of the last bucket that has one.
  c10::intrusive_ptr<c10d::Work> queue_waits();
  /// All that was launched has ended, as far as the process group knows.
  bool has_ended() const;
  /// The attempt has ended.
  void end();

 private:
  void send(bool sends);
  void begin_wait();
  void forget(int64_t index);
  void end_wait();

  GroupLink& link_;
  BucketSet& layout_;
  HookChain& hooks_;
  Stopwatch& watch_;
  std::atomic<int64_t> next_{0};
  ParticipantAttempt* before_ = nullptr;
  ParticipantAttempt* after_ = nullptr;
};

}  // namespace brimful
