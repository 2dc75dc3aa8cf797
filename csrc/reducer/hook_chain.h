#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <cstdint>
#include <exception>
#include <map>
#include <memory>

#include "reducer/bucket_set.h"
#include "reducer/group_link.h"

namespace brimful {

/// The communication hook and the collectives that it makes. A hook may make further collectives when its first one ends,
/// from the group's thread. No other may come between them, in an order that differs from rank to rank: the next bucket is
/// launched when the last hook is done. (That of NCCL is as soon as it has been called: its order is that of the stream.)
class HookChain {
 public:
  explicit HookChain(GroupLink& link) : link_(link) {}

  void set(std::unique_ptr<c10d::CommHookInterface> hook) { hook_ = std::move(hook); }
  std::unique_ptr<c10d::CommHookInterface> take() { return std::move(hook_); }
  bool is_set() const { return hook_ != nullptr; }
  /// The bucket goes through the hook.
  bool takes(const BucketSet& layout, int64_t index) const {
    return hook_ && index != layout.last() && !layout.buckets[index].sparse();
  }
  bool is_done() const { return !last_ || last_->completed(); }

  /// @throws what the hook throws: an error of this rank's own
  void run(BucketSet& layout, int64_t index);
  /// The launch of a bucket has failed at this error: where the hook has made collectives, zeros would make them again.
  void note_failed_launch(std::exception_ptr error, int64_t step);
  /// Waits for the last bucket's hook.
  void wait();
  /// The last hook has ended. One that fails where it makes more collectives otherwise leaves the other ranks waiting for
  /// the rest: whatever this rank sends next would meet those, and gloo ends a process for another size.
  void check(bool throws, int64_t step);
  /// Waits for the hooks of all buckets, and puts their results into the buckets.
  /// @throws c10::ValueError if one has another size than its bucket
  void collect(BucketSet& layout);
  void forget_last() { last_.reset(); }
  /// The buckets are others from now on.
  void forget_counts() { collectives_.clear(); }

 private:
  uint64_t collectives() const;
  std::exception_ptr error_of(c10::ivalue::Future& result) const;

  GroupLink& link_;
  std::unique_ptr<c10d::CommHookInterface> hook_;
  c10::intrusive_ptr<c10::ivalue::Future> last_;  ///< of the last bucket that went to it
  int64_t last_bucket_ = 0;
  uint64_t began_ = 0;                       ///< collectives of the group before it
  std::map<int64_t, uint64_t> collectives_;  ///< by bucket: as many as its hook last made
};

}  // namespace brimful
