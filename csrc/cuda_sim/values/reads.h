#pragma once
#include <string>

namespace sim_values {

/// The operator that the program has called in this thread: what it calls in turn is not named.
class Called {
 public:
  static void enter(const char* name);
  static void leave();
};

/// From now on reads of values that are not known are counted by the line that asked. At the end of the process stderr
/// gets a list of them, and SIM_CUDA_REPORT's file a line with the peaks.
void watch_reads();

}  // namespace sim_values
