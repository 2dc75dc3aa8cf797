#pragma once
#include <brimful/memory/trace.h>
#include <c10/core/Device.h>
#include "sizer/peak_model.h"

#include <cstdint>
#include <memory>
#include <vector>

#include "memory/cuda_caching.h"

namespace brimful {

/// What pieces of a step take of their device while it lives: on the CPU this thread's allocations, on CUDA those of all
/// threads.
class StepTrace {
 public:
  explicit StepTrace(c10::Device device);
  /// Of CUDA allocators torch's own alone.
  static bool is_possible(c10::Device device);

  /// How much has been traced so far.
  size_t size() const;
  /// The first so many events.
  TracedRows traced(int64_t rows, size_t size) const;
  TracedRows traced(int64_t rows) const { return traced(rows, size()); }

 private:
  std::unique_ptr<memory::TraceScope> cpu_;
  std::unique_ptr<memory::CudaTraceScope> cuda_;
};

/// Requests of a CUDA allocator as a trace: blocks that another stream uses are given back when it is done.
BRIMFUL_API TracedRows traced_of(int64_t rows, const std::vector<memory::CachingRequest>& requests);
/// And back. Where the blocks are not known, a block of the same size that was taken last is given back, and `stream` is
/// whose they are.
BRIMFUL_API std::vector<memory::CachingRequest> requests_of(const memory::Trace& trace,
                                                            const std::vector<TracedBlock>& blocks,
                                                            uint64_t stream);

}  // namespace brimful
