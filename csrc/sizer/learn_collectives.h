#pragma once
#include <brimful/sizer/grad_scaler.h>
#include <brimful/sizer/step_input.h>
#include <brimful/step/piece_work.h>

#include "step/step_engine.h"

namespace brimful {

/// Those that the model makes, if a participant must know them and does not yet: a few rows run twice, on all ranks, before
/// an attempt of a step that has captured what they change. `scaler` may be null.
void learn_collectives(StepEngine& engine, const StepInput& input, const PieceWork& work,
                       GradScaler* scaler);

}  // namespace brimful
