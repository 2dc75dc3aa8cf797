#pragma once
#include <brimful/step/control_record.h>

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
};

}  // namespace brimful
