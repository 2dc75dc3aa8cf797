#pragma once
#include <brimful/memory/live_table.h>

namespace brimful::test {

/// Blocks are tracked while it lives.
struct Tracking {
  Tracking() { memory::start_tracking(); }
  ~Tracking() { memory::stop_tracking(); }
  Tracking(const Tracking&) = delete;
  Tracking& operator=(const Tracking&) = delete;
};

}  // namespace brimful::test
