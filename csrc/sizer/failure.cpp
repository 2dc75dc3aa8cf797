// How a step ends that no split can save: what is known is gathered here, and said in too_large.cpp.
#include <brimful/memory/stats.h>
#include <brimful/step/distinct_tensors.h>
#include <brimful/step/oom.h>

#include "memory/tensor_bytes.h"
#include "sizer/batch_sizer_state.h"
#include "sizer/climb.h"
#include "sizer/pair_run.h"
#include "sizer/too_large.h"
#include "step/failures.h"
#include "step/remedy.h"

namespace brimful {
namespace {
constexpr int64_t kOptimizerSlackBytes =
    1024;  // numbers that an optimizer's kernels wrap in tensors

int64_t bytes_on(c10::Device device, const at::Tensor& tensor) {
  return tensor.defined() && tensor.device() == device ? memory::bytes_of(tensor) : 0;
}
}  // namespace

StandingBytes standing_bytes(const std::vector<at::Tensor>& parameters,
                             const std::vector<at::Tensor>& buffers, c10::Device device) {
  StandingBytes standing;
  for (const auto& parameter : distinct_tensors(parameters)) {
    const auto bytes = bytes_on(device, parameter);
    standing.parameters += bytes;
    standing.float32 += parameter.scalar_type() == at::kFloat ? bytes : 0;
    standing.trainable += parameter.requires_grad() ? bytes : 0;
    standing.gradients += bytes_on(device, parameter.grad());
  }
  for (const auto& buffer : distinct_tensors(buffers)) {
    standing.buffers += bytes_on(device, buffer);
  }
  return standing;
}

Shortfall BatchSizer::State::shortfall_of(const StepInput& input) const {
  auto shortfall = shortfall_on(options_.device, options_.standing_bytes);
  shortfall.rank = group_.rank();
  shortfall.world_size = group_.world_size();
  shortfall.rows = input.rows.value_or(0);
  shortfall.max_retries = options_.max_retries;
  shortfall.may_split = norms_.may_split();
  shortfall.state_may_leave = options_.state_may_leave;
  return shortfall;
}

void BatchSizer::State::throw_too_large(const AttemptResult& result, const StepInput& input,
                                        const Outcome& outcome, bool of_pairs) {
  const memory::Unlimited unlimited;
  auto shortfall = shortfall_of(input);
  shortfall.of = result.records.empty() ? Shortfall::Of::lockstep
                 : of_pairs             ? Shortfall::Of::pairs
                                        : Shortfall::Of::split;
  for (const auto& attempt : outcome.attempts) {
    shortfall.tried.push_back({attempt.pieces, attempt.piece_rows, attempt.peak_bytes});
    const auto& rungs = attempt.rungs;
    shortfall.rungs.push_back(rungs.empty() ? std::string() : to_string(rungs));
    shortfall.recomputed_alone =
        !rungs.recomputed.empty() && rungs.offloaded.empty() && !rungs.everything;
  }
  const auto refusal = refusal_in(result.text);
  shortfall.fragmented = refusal && remedy_for(*refusal) == Remedy::release_cache;
  shortfall.ladder_off = !options_.ladder && !options_.recompute && !options_.offload;
  shortfall.climbed =
      ladder_.ladder && !outcome.split.empty() &&
      (outcome.rungs.everything || (!options_.ladder->can_offload() && !outcome.rungs.empty()));
  shortfall.last_error = result.text;
  throw too_large(shortfall);
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
  throw too_large(shortfall);
}

void BatchSizer::State::throw_failure(const AttemptResult& result, const StepInput& input,
                                      const Outcome& outcome, const PairRun* pairs) {
  if (result.own == Status::out_of_memory &&
      (result.records.empty() || result.records[group_.rank()].verdict == Status::out_of_memory)) {
    throw_too_large(result, input, outcome, pairs != nullptr && pairs->in_loss());
  }
  const auto failures = group_.failures(result.records);
  if (failures.empty()) {  // left lockstep: no record came
    detail::throw_rank_failed(-1, steps_, Status::error,
                              "step " + std::to_string(steps_) + " failed on " + result.text);
  }
  throw_step_failed(steps_, failures);
}

}  // namespace brimful
