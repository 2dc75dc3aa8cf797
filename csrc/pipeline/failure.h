#pragma once
#include <brimful/error.h>
#include "pipeline/executor/executor.h"

#include <cstdint>
#include <vector>

namespace brimful::pipeline {

/// The error of the action with to_string(failure) in its message: see Pipeline::step().
[[noreturn]] void rethrow(ActionFailure failure);

/// What a step raises that no number of microbatches would save.
BatchTooLarge too_large(const ActionFailure& failure, int64_t rows, std::vector<TriedSplit> tried,
                        int64_t max_retries, c10::Device device, bool is_fixed,
                        const std::vector<int>& recomputed);

}  // namespace brimful::pipeline
