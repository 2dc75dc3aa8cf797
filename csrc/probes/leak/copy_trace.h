#pragma once
#include <brimful/memory/live_table.h>

#include <cstdint>
#include <vector>

namespace brimful::probes {

/// How much of what a site held before is in a block that an operator has made since.
struct CopiedInto {
  const void* data = nullptr;  ///< of the block
  uint32_t from = 0;           ///< site
  double bytes = 0;            ///< of that site's blocks
};

/// Follows what operators copy from some blocks into new ones, by any number of steps in between: a block has as much of
/// its inputs as they cover of theirs, less what an operator leaves out (a sum of a thousand elements keeps a thousandth).
/// One in a process follows at a time. Kernels that no operator of torch runs (compiled code, NumPy) are not seen.
class CopyTrace {
 public:
  CopyTrace() = default;
  CopyTrace(const CopyTrace&) = delete;
  CopyTrace& operator=(const CopyTrace&) = delete;
  ~CopyTrace() { end(); }

  /// False where another one follows. Each operator costs a microsecond or two from here on.
  bool begin(const std::vector<memory::LiveBlock>& sources);
  /// What is in the new blocks that live still. Nothing where it has not begun.
  std::vector<CopiedInto> end();

 private:
  bool began_ = false;
};

}  // namespace brimful::probes
