#pragma once
#include <brimful/pipeline/executor.h>
#include <brimful/pipeline/outcome.h>

#include <string>
#include <vector>

namespace brimful::pipeline {

/// By stage, from the times of a step's actions. Pure.
std::vector<StageNote> notes_of(const StepResult& result);

/// JSON of Chrome's trace events: the ranks' actions as they ran, and the same schedule with the mean times of each stage's
/// actions, each from its own beginning. Pure.
std::string trace_json(const Schedule& schedule, const StepResult& result);

/// A line for the pipeline and one for each stage.
std::string described(const Executor& executor, const Schedule& last_schedule,
                      const StepResult& last_result);

}  // namespace brimful::pipeline
