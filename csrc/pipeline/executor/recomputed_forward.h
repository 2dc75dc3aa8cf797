#pragma once
#include <brimful/pipeline/stage.h>
#include <brimful/pipeline/value.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "pipeline/executor/keyword_scope.h"
#include "pipeline/executor/skips.h"
#include "pipeline/executor/stage_rung.h"

namespace brimful::pipeline {

/// What a recomputed forward has beside its input.
struct RecomputedForward {
  const Stage& stage;
  SkipRecord& skips;
  std::shared_ptr<GivenKeywords> keywords;
  bool compared = false;
  /// Whether stages have drawn random numbers beside each other, so that they may differ: the step will run again.
  std::function<bool()> drew_together;
  /// Of what a second forward could not be given, such as random numbers of another language. Optional.
  const std::function<int64_t()>& hidden_state;
};

/// What the stage returns, without what it saves for its backward, which runs it again. Its stashed tensors become those of
/// that graph, too.
/// @throws CannotRunAgain, at once or from backward, where that cannot be; what the stage throws
Value forward_to_recompute(const RecomputedForward& work, const Value& input);

}  // namespace brimful::pipeline
