#pragma once
#include <brimful/pipeline/stage.h>

#include <functional>
#include <memory>

#include "pipeline/executor/keyword_scope.h"

namespace brimful::pipeline {

/// This thread runs a stage's forward once more, in a backward.
bool runs_again();

/// Calls of what a forward that is to run once more needs. All of it outlives backward.
struct SecondRun {
  std::function<std::unique_ptr<KeywordScope>()> scope;  ///< with the microbatch's keywords
  /// Gets whether the second run's outputs are the first one's. Empty: they are not compared.
  std::function<void(bool same)> compared;
};

/// What stage.forward(input) returns, but nothing of what it saves for backward is held: backward runs it once more.
/// @throws what the stage throws; c10::ValueError, also from backward, where the stage cannot be run once more
Value forward_recomputed(const Stage& stage, const Value& input, SecondRun second);

}  // namespace brimful::pipeline
