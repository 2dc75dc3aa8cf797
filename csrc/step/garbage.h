#pragma once
#include <brimful/export.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace brimful {
namespace detail {
/// How the program's language finds objects that only refer to each other, and the tensors that they hold. None in C++. It
/// may be called from any thread, and does not throw.
using GarbageCollector = void (*)();
BRIMFUL_API void set_garbage_collector(GarbageCollector collect);
}  // namespace detail

/// The last remedy before a unit of work is split further: once in it, what the program's language can find is freed.
class BRIMFUL_API GarbageRemedy {
 public:
  /// Collects unless it has. True if `device` holds so much less that the same work may fit.
  bool helps(c10::Device device);
  /// What helped since this was asked last; 0: nothing.
  int64_t take_freed_bytes();

 private:
  bool collected_ = false;
  int64_t freed_bytes_ = 0;
};

}  // namespace brimful
