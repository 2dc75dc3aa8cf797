#pragma once
#include <brimful/step/control_record.h>

#include <cmath>
#include <cstdint>

namespace brimful {

/// What ranks agree on, by the records of an exchange, or of the last step.
struct Agreed {
  bool holds = false;  ///< for the next step
  double total = 0;    ///< weight of the next step
  double last_total = 0;
  int64_t pieces = 1;  ///< the most that a rank wants
  int buffer_source = 0;
  bool at_end = false;
  bool owed = false;   ///< the other ranks wait for a repetition that has not begun
  ControlRecord next;  ///< what this rank announces of the step that comes

  /// What the step's losses are divided by: alike on all ranks, and its total weight where that is known before.
  double ref() const {
    return std::isfinite(total) && total > 0 ? total : last_total > 0 ? last_total : 1;
  }
};

}  // namespace brimful
