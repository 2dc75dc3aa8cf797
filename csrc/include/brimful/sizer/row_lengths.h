#pragma once
#include <brimful/sizer/row_kind.h>
#include <brimful/step/step.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace brimful {

/// Rows of unequal length in the order in which a step runs them: the longest first, so that where memory runs out it does
/// so at once. A piece is trimmed to its longest row, which is its first. For StepInput::by_length: the step's rows, its
/// split, and what its PieceWork is asked for are places in this order.
struct RowLengths {
  std::vector<int64_t> lengths;  ///< of the row at each place; none is longer than the one before
  std::vector<int64_t> order;    ///< the row of the batch at each place; goes into Outcome
  /// A piece has its rows one after another, and no padding: it has as many tokens as they have together.
  bool packed = false;
  /// Of the row at this place, trimmed to its length.
  std::function<RowKind(int64_t place)> kind_at;
  /// For forecasts: work on as many rows as are asked for, of the length of the one at this place.
  std::function<PieceWork(int64_t place)> work_at;
};

}  // namespace brimful
