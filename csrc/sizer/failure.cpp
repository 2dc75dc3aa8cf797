// How a step ends that no split can save: what is known is gathered here, and said in too_large.cpp.
#include <brimful/memory/stats.h>

#include "sizer/batch_sizer_state.h"
#include "sizer/climb.h"
#include "sizer/pair_run.h"
#include "step/failures.h"
#include "step/too_large.h"

namespace brimful {
namespace {
constexpr int64_t kOptimizerSlackBytes =
    1024;  // numbers that an optimizer's kernels wrap in tensors
}  // namespace

Shortfall BatchSizer::State::shortfall_of(const StepInput& input) const {
  auto shortfall = shortfall_on(options_.device, options_.standing_bytes);
  shortfall.rank = engine_.group().rank();
  shortfall.world_size = engine_.group().world_size();
  shortfall.rows = input.rows.value_or(0);
  shortfall.max_retries = options_.max_retries;
  shortfall.may_split = norms_.may_split();
  shortfall.state_may_leave = options_.state_may_leave;
  return shortfall;
}

void BatchSizer::State::throw_too_large(const AttemptResult& result, const StepInput& input,
                                        const Retry& retry, bool of_pairs) {
  const memory::Unlimited unlimited;
  auto shortfall = shortfall_of(input);
  shortfall.of = result.records.empty() ? Shortfall::Of::lockstep
                 : of_pairs             ? Shortfall::Of::pairs
                                        : Shortfall::Of::split;
  shortfall.attempts = retry.attempts();
  const auto& rungs = shortfall.attempts.back().rungs;
  shortfall.ladder_off = !options_.ladder && !options_.recompute && !options_.offload;
  shortfall.climbed = ladder_.ladder && shortfall.attempts.back().pieces > 0 &&
                      (rungs.everything || (!options_.ladder->can_offload() && !rungs.empty()));
  shortfall.last_error = result.text;
  throw too_large(std::move(shortfall));
}

void BatchSizer::State::require_room_for_optimizer(const StepInput& input) const {
  if (!options_.device.is_cpu()) {
    return;  // where an allocator's cache may have the room, or have it in pieces of no use
  }
  const auto bytes = options_.optimizer_bytes();
  const auto now = memory::stats(options_.device);
  if (bytes == 0 || !now.limit_bytes ||
      bytes + kOptimizerSlackBytes <= *now.limit_bytes - now.used_bytes) {
    return;
  }
  const memory::Unlimited unlimited;
  auto shortfall = shortfall_of(input);
  shortfall.of = Shortfall::Of::optimizer;
  shortfall.optimizer_bytes = bytes;
  throw too_large(std::move(shortfall));
}

void BatchSizer::State::throw_failure(const AttemptResult& result, const StepInput& input,
                                      const Retry& retry, const PairRun* pairs) {
  if (result.own == Status::out_of_memory &&
      (result.records.empty() ||
       result.records[engine_.group().rank()].verdict == Status::out_of_memory)) {
    throw_too_large(result, input, retry, pairs != nullptr && pairs->in_loss());
  }
  const auto failures = engine_.group().failures(result.records);
  if (failures.empty()) {  // left lockstep: no record came
    detail::throw_rank_failed(
        -1, engine_.steps(), Status::error,
        "step " + std::to_string(engine_.steps()) + " failed on " + result.text);
  }
  throw_step_failed(engine_.steps(), failures);
}

}  // namespace brimful
