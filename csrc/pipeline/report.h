#pragma once
#include <brimful/step/outcome.h>
#include "pipeline/executor/executor.h"

#include <string>
#include <vector>

namespace brimful::pipeline {

/// What is known of the last step that stood.
struct LastStep {
  Schedule schedule;
  StepResult result;
  std::vector<StageNote> notes;
  StepRungs rungs;

  /// `filled`: microbatches that had rows.
  void take(const Executor& executor, const Schedule& order, int64_t filled, StepResult done);
  bool has_times() const;
};

/// The schedule's numbers of this process's stages.
std::vector<int> stage_numbers(const Executor& executor, const Schedule& schedule);

/// By stage, of all processes: what it did, and what the stages of this one hold.
std::vector<StageNote> notes_of(const Executor& executor, const Schedule& schedule,
                                const StepResult& result);

/// JSON of Chrome's trace events: the ranks' actions as they ran, and the same schedule with the mean times of each stage's
/// actions, each from its own beginning. Pure.
std::string trace_json(const Schedule& schedule, const StepResult& result);

/// The same as a picture. Pure.
std::string trace_svg(const Schedule& schedule, const StepResult& result);

/// A line for the pipeline and one for each stage.
std::string to_string(const Executor& executor, const Schedule& last_schedule,
                      const std::vector<StageNote>& last_notes);

}  // namespace brimful::pipeline
