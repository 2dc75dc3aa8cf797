#pragma once
#include <cstdint>
#include <vector>

#include "ladder/step_events.h"

namespace brimful::ladder {

/// What one call takes, for sums over calls.
struct CallBytes {
  int64_t saved = 0;           ///< that no call before it has saved, of all calls inside it too
  int64_t arguments = 0;       ///< that it would keep alone if it were recomputed
  int64_t forward = 0;         ///< the most in use in its forward, with nothing saved
  int64_t backward = 0;        ///< in its backward
  std::vector<int64_t> inner;  ///< calls directly inside
};

/// One for each call.
std::vector<CallBytes> bytes_of_calls(const StepEvents& step);
/// Calls in no other one, of the last piece: those before it are run in the same way.
std::vector<int64_t> outer_calls(const StepEvents& step);

}  // namespace brimful::ladder
