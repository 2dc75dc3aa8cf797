#pragma once
#include <brimful/export.h>
#include "sizer/peak_model.h"

#include <optional>
#include <vector>

namespace brimful {

/// A piece of work that was traced with rows of this length: a sequence's, or an image's side.
struct TracedLength {
  double length = 0;
  std::vector<TracedRows> traces;  ///< by rows, ascending
};

/// The traces that work of another length would leave: each allocation is a polynomial of second degree in the length.
/// `known` is sorted by length. The parabola goes through three lengths, the others check it. An allocation that is off
/// it gets more by what it is off where that is rounding, and what the next larger length needs where it grows in steps:
/// too large rather than too small.
/// Nothing where `length` must be traced itself: fewer than four lengths with one sequence of allocations around it, more
/// than a factor of two beyond them, or what is added is more than 2 % of the peak. Pure.
BRIMFUL_API std::optional<std::vector<TracedRows>> traces_at(const std::vector<TracedLength>& known,
                                                             double length);

}  // namespace brimful
