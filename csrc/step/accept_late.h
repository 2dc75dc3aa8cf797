#pragma once
#include "step/pieces_run.h"
#include "step/step_engine.h"

namespace brimful {

/// Accepts an attempt whose losses were divided by a number that a device has, or should have been: its gradients are
/// multiplied by what makes them the mean, there, and are zero where the total is no number to divide by. `checks`: a gradient
/// that is not finite is a mistake. Does not wait.
void accept_late(StepEngine& engine, const AttemptResult& result, const Divisor& ref, bool checks);

}  // namespace brimful
