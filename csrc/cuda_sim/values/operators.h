#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <set>
#include <string>

namespace sim_values {

/// What an operator does with values.
enum class Kind {
  none,  // it makes names, views or memory for others, or is made of operators that are seen themselves
  unknown,   // its results are not known, nor what it makes of its arguments
  computed,  // the host's kernel computes what the device's would
  finite,    // the same, and of numbers that are not known it says what holds of finite ones
  counts,  // the same as computed, and it waits for a count of values, by which its results are large
};

struct Operator {
  c10::OperatorHandle handle;
  Kind kind;
  bool overwrites;  // what its first argument was does not matter
  bool decides;     // a value of one side may decide, whatever the other is
  bool forgets;     // it may change arguments without saying so
  bool draws;       // from a generator
};

/// What is known of an operator; nullptr for a name that is none.
const Operator* find_operator(const c10::OperatorName& name);

}  // namespace sim_values
