// Which stages recompute: one more whenever memory runs out and microbatches cannot be smaller.
#include <brimful/log.h>

#include "pipeline/pipeline_state.h"

namespace brimful::pipeline {

std::optional<int> Pipeline::State::stage_to_change(const Call& call,
                                                    const StepResult& result) const {
  const auto& failure = result.failure;
  if (!failure || failure->index < 0 || options.recompute == Recompute::never || !call.trains ||
      call.refused || !call.retry.may_repeat()) {
    return std::nullopt;
  }
  const int failed = failure->action.stage;
  if (failure->kind != Status::out_of_memory) {
    const bool by_itself = options.recompute == Recompute::where_needed;
    return by_itself && executor->recomputes(failed) ? std::optional(failed) : std::nullopt;
  }
  const auto placed = rank_of_stage(call.order);
  const auto device = device_of(*failure);
  const auto bytes = [&](int stage) {
    return stage < std::ssize(result.peak_live_bytes) ? result.peak_live_bytes[stage] : 0;
  };
  std::optional<int> best;
  for (int stage = 0; stage < std::ssize(placed); ++stage) {
    const bool is_here = !options.peers || placed[stage] == options.peers->rank();
    if (!is_here || options.devices[options.peers ? 0 : placed[stage]] != device ||
        executor->recomputed().count(stage) > 0) {
      continue;
    }
    if (!best || bytes(stage) > bytes(*best) || (bytes(stage) == bytes(*best) && stage == failed)) {
      best = stage;
    }
  }
  return best;
}

void Pipeline::State::change_recomputed(int stage, const ActionFailure& failure) {
  const bool ran_out = failure.kind == Status::out_of_memory;
  executor->set_recomputed(stage, ran_out);
  log(LogLevel::warning,
      ran_out ? "memory ran out in the " + pipeline::to_string(failure) +
                    ", and microbatches cannot be smaller: the step is repeated, and stage " +
                    std::to_string(stage) + " runs its forward once more in backward from now"
              : "stage " + std::to_string(stage) +
                    " failed while it ran its forward once more in backward, which it does no "
                    "longer: the step is repeated (" +
                    failure.text + ")");
}

}  // namespace brimful::pipeline
