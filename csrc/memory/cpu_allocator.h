#pragma once
#include <c10/core/Allocator.h>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include "memory/block_table.h"

namespace brimful::memory {

/// torch's CPU allocator with a count and a limit. Lives for ever: tensors may be freed at any time of the exit.
///
/// Each block is | 64-byte header | data |: the data keep malloc's 64-byte alignment, and the context of a DataPtr is
/// its data, without which torch's raw_allocate (oneDNN, conv2d) asserts. The header carries the size, a seal and the block's
/// place in the live table.
/// raw_deallocate is asked for blocks of the former allocator too (oneDNN's, say): these have no seal
/// and go back to it.
class BudgetAllocator final : public c10::Allocator {
 public:
  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

  static BudgetAllocator& instance();
  void install();

  c10::DataPtr allocate(size_t nbytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* dest, const void* src, size_t count) const override;

  int64_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }
  int64_t allocations() const { return allocations_.load(std::memory_order_relaxed); }
  int64_t ooms() const { return ooms_.load(std::memory_order_relaxed); }
  int64_t limit_bytes() const { return limit_bytes_.load(std::memory_order_relaxed); }
  /// The limit holds for no thread until this has been undone as often.
  void lift_limit(bool lift) { lifted_.fetch_add(lift ? 1 : -1, std::memory_order_relaxed); }
  void set_limit_bytes(int64_t bytes) { limit_bytes_.store(bytes, std::memory_order_relaxed); }

  /// The most in use since the watermark was last lowered.
  int64_t watermark_bytes() const { return watermark_bytes_.load(std::memory_order_acquire); }
  /// Lowers the watermark to what is in use; returns what it was. One caller at a time.
  int64_t lower_watermark();

 private:
  BudgetAllocator() = default;
  static void release(void* data);
  void* take(int64_t bytes, bool unlimited);
  void* take_tracked(int64_t bytes, bool unlimited);
  void give_back_tracked(Ticket ticket, int64_t bytes);
  /// The bytes in use with these, or nothing where they would pass the limit.
  std::optional<int64_t> reserve(int64_t bytes, bool unlimited);
  /// nullptr where the system has none left.
  static void* allocate_block(int64_t bytes);
  void raise_watermark(int64_t used_bytes);
  void check_faults(size_t nbytes, bool unlimited);
  static void record(int64_t bytes, const void* data);
  [[noreturn]] void refuse(int64_t bytes, const char* remedy);

  alignas(64) std::atomic<int64_t> used_bytes_{0};
  std::atomic<int64_t> watermark_bytes_{0};
  std::atomic<int64_t> allocations_{0};
  std::atomic<int64_t> limit_bytes_{kNoLimit};
  std::atomic<int64_t> lifted_{0};
  std::atomic<int64_t> ooms_{0};
  std::atomic<c10::DeleterFnPtr> former_deleter_{nullptr};
};

}  // namespace brimful::memory
