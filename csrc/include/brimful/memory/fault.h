#pragma once
#include <brimful/export.h>
#include <cstdint>

namespace brimful::memory {

/// For tests: this thread's CPU allocation number `index` from now (0 is the next one) throws c10::OutOfMemoryError,
/// once. Allocations under an Unlimited and allocations of no bytes are not counted; with several FaultAts each counts
/// for itself. Installs the allocator. Destroy it on the thread that made it, the newest first.
/// @throws c10::ValueError if `index` is negative
class BRIMFUL_API FaultAt {
 public:
  explicit FaultAt(int64_t index);
  ~FaultAt();
  FaultAt(const FaultAt&) = delete;
  FaultAt& operator=(const FaultAt&) = delete;

  bool fired() const { return fired_; }
  /// Allocations counted so far, the refused one included.
  int64_t seen() const { return seen_; }

 private:
  friend class BudgetAllocator;
  bool count_one();

  int64_t index_;
  int64_t seen_ = 0;
  bool fired_ = false;
  FaultAt* outer_;
};

}  // namespace brimful::memory
