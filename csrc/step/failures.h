#pragma once
#include <brimful/step/failure.h>

#include <string>
#include <vector>

#include "step/failure_board.h"

namespace brimful {

/// What a rank that failed has posted at `place`; waits a second at most. `verdict`: what its record says, for the case
/// that its message does not arrive.
Failure posted_failure(const FailureBoard& board, const std::string& place, int rank,
                       Status verdict);

class StepGroup;

/// What a rank of the group has posted whose record says that it failed.
std::string failure_text(const StepGroup& group, int rank);

/// The first that ran out of memory, since a program can act on that; else the first. There is at least one.
const Failure& severest(const std::vector<Failure>& failures);

/// "rank 1: its text; rank 2: ..."
std::string to_string(const std::vector<Failure>& failures);

/// Raises the severest of them, "step 3 failed on rank 1: its text; ..."
/// @throws RankFailed, RankOutOfMemory
[[noreturn]] void throw_step_failed(int64_t step, const std::vector<Failure>& failures);

}  // namespace brimful
