#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "reducer/attempt.h"
#include "reducer/bucket_set.h"
#include "reducer/deferred_copies.h"
#include "reducer/hook_chain.h"

namespace brimful {

/// Of gradients, on their way.
struct Scales {
  double gradients = 1;  ///< into a bucket that is sent as it is
  double sparse = 1;     ///< of sparse gradients
  double wire = 1;       ///< into the reduction dtype
  double hook = 1;       ///< of what a communication hook returned
};

/// An attempt's gradients, and their way into the buckets and back: each is moved into a flat buffer while the caches still
/// hold it and p.grad becomes a view, or stays where it is if it is large; what did not come is filled in.
class Placement {
 public:
  Placement(BucketSet& layout, const HookChain& hooks, const Attempt& attempt)
      : layout_(layout), hooks_(hooks), attempt_(attempt), copies_(layout) {}
  /// `watch`: called with gradients that have a graph, since a loss of one reaches the parameters too.
  void watch_histories(std::function<void(const at::Tensor&)> watch) { watch_ = std::move(watch); }

  void set_scales(const Scales& scales) { scales_ = scales; }
  const Scales& scales() const { return scales_; }
  /// No gradient of the backward that begins has come.
  void begin_backward();
  /// A gradient has come; `arrived` is what autograd made it from. True if it is the last one of its bucket.
  bool place_next(int64_t parameter, const at::Tensor& arrived);
  bool has_come(int64_t parameter) const { return seen_[parameter] == generation_; }
  /// A gradient has come once more, and autograd has added it to the first.
  void add_again(int64_t parameter, const at::Tensor& gradient);
  /// Zeros in the bucket for gradients that did not come. True if there were such.
  bool fill(int64_t index);
  /// No more gradients of this backward come: those that are held back go into their buckets.
  void end_backward() { copies_.flush_all(); }
  /// By parameter: had a gradient when its bucket was filled.
  const std::vector<uint8_t>& used() const { return used_; }

  /// The sums in the buckets, times `scale`, become the gradients; `carry` is for the rounding error, which the next step
  /// adds. `keep_unused` as in ParticipantAttempt::accept().
  void take_sums(double scale, double carry, bool keep_unused);
  /// Empties the gradients.
  void discard();
  void forget();

 private:
  void place(int64_t parameter, const at::Tensor& arrived);
  void place_flat(int64_t parameter, double scale);
  void place_direct(int64_t parameter, const at::Tensor& arrived);
  double scale_into(const Bucket& bucket, int64_t index) const;
  void take_sum(size_t parameter, double scale, bool keep_unused);

  BucketSet& layout_;
  const HookChain& hooks_;
  const Attempt& attempt_;
  DeferredCopies copies_;
  std::function<void(const at::Tensor&)> watch_;
  Scales scales_;
  int64_t generation_ = 0;     ///< of the backward that runs
  std::vector<int64_t> seen_;  ///< by parameter: the generation in which its gradient came
  std::vector<uint8_t> used_;
  std::vector<int64_t> with_history_;  ///< parameters whose gradient has a graph of its own
};

}  // namespace brimful
