#pragma once
#include <brimful/export.h>

#include <array>
#include <cstdint>
#include <vector>

#include "sizer/length_plan.h"

namespace brimful {

/// What pieces were seen to take, and the law that follows: so much for a piece, for a token, and for a token times the
/// length, none of them negative. What is old counts less. Plain data; not thread-safe.
class BRIMFUL_API PieceTimes {
 public:
  /// Pieces that took so long together: these of `split`, in the order of `lengths`, from `place` on.
  void note(const Lengths& lengths, int64_t place, const std::vector<int64_t>& split, double ms);
  /// By guess where little was seen.
  PieceCost cost() const;

 private:
  using Three = std::array<double, 3>;
  std::array<Three, 3> products_ = {};  ///< of what pieces have, by tokens, with itself
  Three times_ = {};                    ///< and with the time of a token
  double seen_ = 0;
};

}  // namespace brimful
