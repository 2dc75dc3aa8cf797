#pragma once
#include <brimful/probes/leak.h>

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "probes/leak/copy_trace.h"

namespace brimful::probes {

/// A block of a site that is copied whole: how much of it the blocks before it had.
struct CopiedBlock {
  const void* data = nullptr;
  int64_t bytes = 0;
  double copied_bytes = 0;
};

/// A site whose blocks of each step replace those of the step before, have all that they had, and are larger:
/// `growth.bytes` is by how much, over `growth.steps` of them.
struct CopiedGrowth {
  Growth growth;
  std::vector<CopiedBlock> blocks;
};

/// Finds such sites. A batch or an activation that is larger each step is replaced as well, but no operator has copied the
/// one before into it: operators are followed (CopyTrace) in steps that may be the last ones to decide.
class CopiedSites {
 public:
  /// Whether the caller wants to know what is copied into the blocks of a site when it has grown so many times.
  using Wants = std::function<bool(uint32_t site, int64_t growths)>;

  /// After each step `done`: with what lives. What is copied is known where it was wanted.
  std::vector<CopiedGrowth> look(const std::vector<memory::LiveBlock>& blocks, int64_t done,
                                 const GrowthOptions& options, const Wants& wants);
  /// Follows no operator until the next look.
  void rest();

 private:
  struct Fresh {  // the newest of a site
    int64_t step = -1;
    std::vector<memory::LiveBlock> blocks;
    int64_t bytes = 0;
    int64_t bytes_before = 0;  // what is left of those that were the newest
  };
  using FreshBySite = std::map<uint32_t, Fresh>;

  struct Run {
    int64_t step = -1;  // the newest blocks', and their bytes
    int64_t bytes = 0;
    int64_t first_bytes = 0;
    int64_t growths = 0;  // one after the other, at even intervals
    int64_t grown = 0;    // the look at the newest of them
    int64_t least = 0;    // interval
    int64_t most = 0;
    int copies = 0;            // growths that were seen to copy
    int failures = 0;          // and those that were seen not to
    int64_t rests_until = 0;   // look
    double traced_bytes = -1;  // of the blocks whose copies are followed now; -1: they are not
  };

  FreshBySite fresh_blocks(const std::vector<memory::LiveBlock>& blocks, int64_t done) const;
  void advance(Run& run, const Fresh& fresh, double copied);
  void grow(Run& run, bool follows, bool copied);
  void follow(const FreshBySite& fresh, const GrowthOptions& options, const Wants& wants);

  CopyTrace trace_;
  std::map<uint32_t, Run> runs_;
  int64_t looks_ = 0;
};

}  // namespace brimful::probes
