#pragma once
#include <brimful/export.h>
#include <cstdint>

namespace brimful::memory {

/// For tests: this thread's CPU allocation number `index` from now (0 is the next one) throws c10::OutOfMemoryError,
/// once. Allocations of no bytes are not counted, and those under an Unlimited only with `unlimited_too`: no limit
/// refuses them, but a machine may have nothing left. With several FaultAts each counts for itself. Installs the
/// allocator. Destroy it on the thread that made it, the newest first.
/// @throws c10::ValueError if `index` is negative
class BRIMFUL_API FaultAt {
 public:
  explicit FaultAt(int64_t index, bool unlimited_too = false);
  ~FaultAt();
  FaultAt(const FaultAt&) = delete;
  FaultAt& operator=(const FaultAt&) = delete;

  bool fired() const { return fired_; }
  /// Allocations counted so far, the refused one included.
  int64_t seen() const { return seen_; }

 private:
  friend class BudgetAllocator;
  bool count_one(bool unlimited);

  int64_t index_;
  bool unlimited_too_;
  int64_t seen_ = 0;
  bool fired_ = false;
  FaultAt* outer_;
};

}  // namespace brimful::memory
