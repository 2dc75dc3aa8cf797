#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <vector>

#include "reducer/bucket_set.h"

namespace brimful {

/// Gradients of devices on their way into flat buckets: one call copies all that a bucket holds back, and one scales them. The
/// CPU copies each by itself while its caches hold it. Under the attempt's lock.
class DeferredCopies {
 public:
  /// Of gradients, in all buckets together: what is beyond is copied at once.
  static constexpr int64_t kMostBytes = int64_t{32} << 20;

  explicit DeferredCopies(BucketSet& layout) : layout_(layout) {}

  /// The parameter's gradient is in its bucket, times `scale`, once the bucket was flushed: p.grad is a view then. The
  /// current stream is the bucket's. False if it is not held back: the caller copies it.
  bool hold(int64_t parameter, double scale);
  /// What the parameter's gradient is now will be copied, or scaled in its place.
  bool holds(int64_t parameter) const;
  /// Copies what the bucket holds back, in the current stream behind all that was done to it before. Does not synchronise the device.
  void flush(int64_t index);
  void flush_all();
  /// Nothing is copied any more.
  void forget();

 private:
  void give_view(const Bucket::Held& held);

  BucketSet& layout_;
  int64_t bytes_ = 0;  ///< held back, and not in a bucket
};

}  // namespace brimful
