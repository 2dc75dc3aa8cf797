#pragma once
#include <brimful/export.h>

#include <cstdint>
#include <vector>

namespace brimful::memory {

/// What a thread took of the CPU's memory and gave back, in order: bytes, negative where they were given back. Blocks from
/// before the trace show only when they are freed.
using Trace = std::vector<int64_t>;

/// The most that was in use over what was in use at the beginning.
BRIMFUL_API int64_t peak_bytes(const Trace& trace);

/// Records this thread's CPU allocations while it lives. Nests. Destroy it on the same thread.
class BRIMFUL_API TraceScope {
 public:
  TraceScope();
  ~TraceScope();
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

  const Trace& trace() const { return trace_; }
  /// The address of the block of each event.
  const std::vector<uintptr_t>& blocks() const { return blocks_; }

 private:
  friend class BudgetAllocator;
  Trace trace_;
  std::vector<uintptr_t> blocks_;
  TraceScope* outer_;
};

}  // namespace brimful::memory
