#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>
#include <brimful/memory/trace.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "ladder/step_events.h"
#include "memory/cuda_caching.h"

namespace brimful::ladder {

/// Records one piece of a step while what it saves for backward is put aside. Made and destroyed on the thread that runs it;
/// use() and drop() come from any.
class BRIMFUL_API StepEventRecorder {
 public:
  explicit StepEventRecorder(c10::Device device);

  /// A call of a module begins. Waits for the device.
  void enter(int32_t module, const std::vector<at::Tensor>& arguments);
  /// The innermost ends.
  void leave();
  /// Of the innermost call, or with a module the last of its calls.
  void note_copied(int32_t module, int64_t bytes);
  /// Of the calls under way, which were looked at for so long.
  void leave_out(double ms);
  /// A piece's, or its backward.
  void begin_forward();
  void begin_backward();

  /// The storage is put aside, which took so long; returns its place.
  int64_t save(const c10::Storage& storage, std::chrono::duration<double, std::milli> took);
  void use(int64_t save);
  void drop(int64_t save);

  /// Nothing is recorded any more.
  StepEvents finish();
  /// The same for a piece that failed, where no record is wanted. On the thread that made it, though others still hold it.
  void stop();

 private:
  enum class Kind : uint8_t { enter, leave, argument, save, use, drop };
  struct Mark {
    Kind kind;
    size_t behind;  ///< so many of the device's events
    int64_t what;   ///< call or save
    uintptr_t address = 0;
  };
  class Reader;
  size_t seen() const { return cuda_ ? cuda_->size() : cpu_->trace().size(); }
  void mark(Kind kind, int64_t what, uintptr_t address = 0);
  double now_ms() const;

  c10::Device device_;
  std::unique_ptr<memory::TraceScope> cpu_;
  std::unique_ptr<memory::CudaTraceScope> cuda_;
  std::mutex mutex_;
  bool open_ = true;
  bool in_backward_ = false;
  int32_t piece_ = -1;
  std::vector<Mark> marks_;
  std::vector<int64_t> stack_;
  StepEvents found_;
  double aside_ms_ = 0;
  double left_out_ms_ = 0;  ///< beside that, in no call's time
  int64_t aside_bytes_ = 0;
};

}  // namespace brimful::ladder
