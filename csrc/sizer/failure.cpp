// How a step ends that no split can save: what is known is gathered here, and said in too_large.cpp.
#include <ATen/autocast_mode.h>
#include <brimful/memory/stats.h>
#include <brimful/sizer/batch_sizer.h>
#include <brimful/step/oom.h>

#include "sizer/too_large.h"
#include "step/remedy.h"

namespace brimful {
namespace {
int64_t bytes_of(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || tensor.device() != device) {
    return 0;
  }
  if (tensor.is_sparse()) {
    return static_cast<int64_t>(tensor._values().nbytes() + tensor._indices().nbytes());
  }
  return tensor.layout() == at::kStrided ? static_cast<int64_t>(tensor.nbytes()) : 0;
}
}  // namespace

StandingBytes standing_bytes(const std::vector<at::Tensor>& parameters,
                             const std::vector<at::Tensor>& buffers, c10::Device device) {
  StandingBytes standing;
  for (const auto& parameter : parameters) {
    const auto bytes = bytes_of(parameter, device);
    standing.parameters += bytes;
    standing.float32 += parameter.scalar_type() == at::kFloat ? bytes : 0;
    standing.trainable += parameter.requires_grad() ? bytes : 0;
    standing.gradients += bytes_of(parameter.grad(), device);
  }
  for (const auto& buffer : buffers) {
    standing.buffers += bytes_of(buffer, device);
  }
  return standing;
}

bool BatchSizer::release_helps(const std::string& shortage) const {
  auto refusal = refusal_in(shortage);
  const auto kind = shortage_in(shortage);
  if (!refusal && (kind == Shortage::outside || kind == Shortage::unclear)) {
    const auto now = memory::stats(options_.device);
    refusal.emplace();
    refusal->reserved_bytes = now.reserved_bytes;
    refusal->allocated_bytes = now.used_bytes;
  }
  return refusal && remedy_for(*refusal) == Remedy::release_cache;
}

void BatchSizer::throw_too_large(const AttemptResult& result, const StepInput& input,
                                 const Outcome& outcome) {
  const memory::Unlimited unlimited;
  const auto now = memory::stats(options_.device);
  const auto refusal = refusal_in(result.text);
  Shortfall shortfall;
  shortfall.rank = group_.rank();
  shortfall.world_size = group_.world_size();
  shortfall.device = options_.device;
  shortfall.rows = input.rows.value_or(0);
  shortfall.max_retries = options_.max_retries;
  shortfall.lockstep = result.records.empty();
  shortfall.may_split = norms_.may_split();
  for (const auto& attempt : outcome.attempts) {
    shortfall.tried.push_back({attempt.pieces, attempt.piece_rows, attempt.peak_bytes});
  }
  if (options_.standing_bytes) {
    shortfall.standing = options_.standing_bytes();
  }
  shortfall.used_bytes = now.used_bytes;
  shortfall.limit_bytes = now.limit_bytes;
  shortfall.others = memory::held_by_others(options_.device);
  shortfall.autocast = at::autocast::is_autocast_enabled(options_.device.type());
  shortfall.fragmented = refusal && remedy_for(*refusal) == Remedy::release_cache;
  shortfall.last_error = result.text;
  auto facts = facts_of(shortfall);
  const auto words = words_for(shortfall, facts);
  throw BatchTooLarge(words, std::move(facts));
}

void BatchSizer::throw_failure(const AttemptResult& result, const StepInput& input,
                               const Outcome& outcome) {
  if (result.own == AttemptResult::Own::out_of_memory &&
      (result.records.empty() || result.records[group_.rank()].verdict == Verdict::failed_memory)) {
    throw_too_large(result, input, outcome);
  }
  auto failed = ranks_with(result.records, Verdict::failed_memory);
  const bool memory = !failed.empty();
  if (!memory) {
    failed = ranks_with(result.records, Verdict::failed);
  }
  detail::throw_rank_failed(
      failed.empty() ? -1 : failed.front(), steps_,
      memory ? FailureKind::out_of_memory : FailureKind::error,
      "step " + std::to_string(steps_) + " failed on " +
          (result.records.empty() ? result.text : group_.failure_texts(result.records)));
}

}  // namespace brimful
