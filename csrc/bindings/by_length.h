#pragma once
#include <brimful/sizer/row_lengths.h>
#include <brimful/sizer/step_input.h>

#include "bindings/bindings.h"

namespace brimful {

/// Puts rows, weight, kind and lengths of a RowsByLength of Python (sizer/_by_length.py) in place of the batch's, and
/// returns the work on its pieces. Needs the GIL.
PieceWork put_lengths(StepInput& input, const py::object& rows, const py::object& loss_fn,
                      const py::object& model);

}  // namespace brimful
