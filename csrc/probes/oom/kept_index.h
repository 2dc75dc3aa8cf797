#pragma once
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <cstdint>
#include <memory>
#include <optional>
#include "probes/oom/index_check.h"
#include "probes/oom/pinned_copies.h"

namespace brimful::probes {

/// What is left of an operator's indices to look at later. Never waits for a device, and can be destroyed when it is dead.
class KeptIndex {
 public:
  explicit KeptIndex(const IndexUse& use);

  /// Nothing if the values are gone, or never came.
  std::optional<IndexRange> range() const;
  int64_t first() const { return first_; }
  int64_t last() const { return last_; }
  /// The device is not there yet.
  bool pending() const { return copy_ && copy_->pending(); }
  /// There was no place for a copy.
  bool dropped() const { return dropped_; }

 private:
  int64_t first_;
  int64_t last_;
  std::optional<int64_t> ignored_;
  std::optional<IndexRange> range_;                                 // a short one on the CPU
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> tensor_;  // a long one on the CPU
  std::shared_ptr<PinnedCopy> copy_;                                // a short one on CUDA
  bool dropped_ = false;
};

}  // namespace brimful::probes
