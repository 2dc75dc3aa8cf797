// How a call of a pipeline fails: with what this rank knows, or what another rank says.
#include <brimful/error.h>

#include "pipeline/failure.h"
#include "pipeline/pipeline_step.h"

namespace brimful::pipeline {

c10::Device Pipeline::State::PipelineStep::device_of(const ActionFailure& failure) const {
  return p_.options.devices[p_.options.peers ? 0 : failure.rank];
}

void Pipeline::State::PipelineStep::raise(StepResult& result) {
  const bool memory = verdict_.kind == Status::out_of_memory;
  if (call_.refused) {
    std::rethrow_exception(call_.refused);
  }
  if (verdict_.rank < 0) {
    TORCH_CHECK_VALUE(false, verdict_.text);
  }
  if (result.failure && result.failure->kind == verdict_.kind) {
    if (result.failure->index >= 0) {
      p_.last_failure = result.failure;
      p_.last_failure->error = nullptr;  // pins what its frames hold
    }
    if (!memory) {
      rethrow(std::move(*result.failure));
    }
    if (own_verdict(result).kind == verdict_.kind) {
      throw too_large(shortfall_of({.call = call_,
                                    .failure = *result.failure,
                                    .device = device_of(*result.failure),
                                    .options = p_.options,
                                    .stages = p_.executor->stages(),
                                    .rung = p_.recomputing->of(result.failure->action.stage),
                                    .may_split = p_.agreement.may_split()}));
    }
  }
  const auto where =
      "rank " + std::to_string(verdict_.rank) +
      (call_.group.world_size() > 1 ? " of replica " + std::to_string(verdict_.replica) : "");
  brimful::detail::throw_rank_failed(
      verdict_.rank, -1, verdict_.kind,
      memory ? "the pipeline's step ran out of memory on " + where +
                   (p_.options.fixed_schedule ? " under a fixed schedule: "
                                              : " with any number of microbatches: ") +
                   verdict_.text
             : "the pipeline's step failed on " + where + ": " + verdict_.text);
}

void Pipeline::State::PipelineStep::give_up(const StepResult& result) {
  StepGroup(p_.replicas->participants(), {}).abandon(Status::error, result.failure->text);
  undo();
  std::rethrow_exception(result.failure->error);
}

}  // namespace brimful::pipeline
