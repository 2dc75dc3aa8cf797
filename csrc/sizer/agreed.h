#pragma once
#include <brimful/step/control_record.h>

#include <cstdint>
#include <string>

namespace brimful {

/// How the loss is composed, of a sizer that finds it out.
struct FoundRule {
  bool pending = false;  ///< the next step begins with an exchange, in which the ranks settle it
  std::string name;
  int64_t runs = 0;  ///< forwards and backwards that finding it out took
  double ms = 0;
};

/// What a sizer's ranks agree on, by the records of an exchange, or of the last step.
struct Agreed {
  bool holds = false;  ///< for the next step
  double total = 0;    ///< weight of the next step
  double last_total = 0;
  int64_t pieces = 1;  ///< the most that a rank wants
  int buffer_source = 0;
  bool at_end = false;
  bool owed = false;   ///< the other ranks wait for a repetition that has not begun
  ControlRecord next;  ///< what this rank announces of the step that comes
  FoundRule rule;
};

}  // namespace brimful
