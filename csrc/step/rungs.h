#pragma once
#include <cstdint>
#include <vector>

namespace brimful {

/// What a step does to take less memory than one row takes, by the numbers of its model's modules, ascending. No module of
/// either lies inside another one of them.
struct Rungs {
  std::vector<int32_t> recomputed;  ///< their forward saves nothing, and runs once more in backward
  std::vector<int32_t> offloaded;   ///< what they save for backward lies in a file, or on the host
  /// Whatever is saved for backward is put aside, and the step is recorded.
  bool everything = false;
  /// On CUDA what is offloaded comes back when what was put aside behind it is used, not when it is used itself.
  bool ahead = false;

  bool empty() const { return recomputed.empty() && offloaded.empty() && !everything; }
  bool operator==(const Rungs&) const = default;
};

}  // namespace brimful
