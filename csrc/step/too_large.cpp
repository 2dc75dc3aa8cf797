#include "step/too_large.h"

#include <ATen/autocast_mode.h>
#include <brimful/memory/stats.h>

#include <algorithm>
#include <utility>

#include "base/format.h"
#include "base/text_stream.h"
#include "memory/is_counted.h"
#include "step/remedy.h"

namespace brimful {
namespace {
int64_t at_least_0(int64_t bytes) {
  return std::max<int64_t>(0, bytes);
}

const AttemptNote& last(const Shortfall& shortfall) {
  static const AttemptNote nothing;
  return shortfall.attempts.empty() ? nothing : shortfall.attempts.back();
}

bool recomputes_alone(const StepRungs& rungs) {
  return !rungs.recomputed.empty() && rungs.offloaded.empty() && !rungs.everything;
}

bool is_of(const Shortfall& shortfall, Shortfall::Of of) {
  return shortfall.of == of;
}

bool could_split(const Shortfall& shortfall) {
  return !is_of(shortfall, Shortfall::Of::optimizer) && !is_of(shortfall, Shortfall::Of::pairs) &&
         !shortfall.is_fixed && last(shortfall).pieces < shortfall.rows;
}

/// What did not fit beside what is in use: the work of the last try, or the optimizer's.
int64_t work_bytes(const Shortfall& shortfall) {
  return is_of(shortfall, Shortfall::Of::optimizer)
             ? shortfall.optimizer_bytes
             : at_least_0(last(shortfall).peak_bytes - shortfall.used_bytes);
}

std::string counted(int64_t count, const std::string& what) {
  const char* plural = what == "microbatch" ? "es" : "s";
  return std::to_string(count) + " " + what + (count == 1 ? "" : plural);
}

const char* unit_of(const Shortfall& shortfall) {
  return is_of(shortfall, Shortfall::Of::stages) ? "microbatch" : "piece";
}

template <typename Pairs>
std::string listed(const Pairs& pairs) {
  std::string text;
  for (const auto& [name, bytes] : pairs) {
    text += (text.empty() ? "" : ", ") + name + " " + format_bytes(bytes);
  }
  return text;
}

/// What a tenth of it would not show is not worth a user's time.
bool worth_it(int64_t bytes, const Shortfall& shortfall) {
  const auto peak = is_of(shortfall, Shortfall::Of::optimizer)
                        ? shortfall.used_bytes + shortfall.optimizer_bytes
                        : last(shortfall).peak_bytes;
  return bytes > 0 && bytes >= peak / 10;
}

void advise_on_splits(const Shortfall& shortfall, std::vector<std::string>& advice) {
  if (!could_split(shortfall)) {
    return;
  }
  if (!shortfall.may_split) {
    advice.emplace_back(
        "allow splits (batch_norm=\"warn\", \"freeze\" or \"rescale\"), or use GroupNorm");
    return;
  }
  const auto finer = std::to_string(std::min(shortfall.rows, 2 * last(shortfall).pieces));
  const auto more = is_of(shortfall, Shortfall::Of::stages)
                        ? "begin with more microbatches (microbatches=" + finer + ")"
                        : "begin with more pieces (pieces=" + finer + ")";
  advice.push_back(is_of(shortfall, Shortfall::Of::lockstep)
                       ? more + ": ranks in lockstep cannot split further by themselves"
                       : "raise max_retries, or " + more);
}

void advise_on_capacity(const Shortfall& shortfall, std::vector<std::string>& advice) {
  const auto& others = shortfall.others;
  if (shortfall.limit_bytes) {
    const auto beyond =
        others.free_bytes ? std::optional(*others.free_bytes -
                                          at_least_0(*shortfall.limit_bytes - shortfall.used_bytes))
                          : std::nullopt;
    if (!beyond || *beyond > 0) {
      advice.push_back(
          "raise the memory limit (memory.set_limit, now: " + format_bytes(*shortfall.limit_bytes) +
          (beyond ? ", free beyond it: " + format_bytes(*beyond) : "") + ")");
    }
  }
  if (shortfall.fragmented) {
    advice.emplace_back(
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the bytes are there, in fragments");
  }
  if (!shortfall.limit_bytes && others.others_bytes && worth_it(*others.others_bytes, shortfall)) {
    advice.push_back("free what others hold of this memory (" + format_bytes(*others.others_bytes) +
                     ")");
  }
}

void advise_on_work(const Shortfall& shortfall, std::vector<std::string>& advice) {
  const auto bytes = work_bytes(shortfall);
  if (is_of(shortfall, Shortfall::Of::optimizer) || is_of(shortfall, Shortfall::Of::pairs) ||
      !worth_it(bytes, shortfall)) {
    return;
  }
  const bool mapping = is_of(shortfall, Shortfall::Of::mapping);
  if (is_of(shortfall, Shortfall::Of::stages)) {
    // said of the stage
  } else if (shortfall.climbed) {
    advice.push_back(
        "split the model over several devices (Pipeline), or split its largest operators (while "
        "one runs: " +
        format_bytes(bytes) +
        "): what is held between forward and backward is recomputed or offloaded already");
  } else if (recomputes_alone(last(shortfall).rungs)) {
    advice.push_back(
        shortfall.device.is_cpu()
            ? "let the ladder offload: set BRIMFUL_SCRATCH_DIR to a directory on a disk with free "
              "space (the last attempt recomputed modules and offloaded nothing)"
            : "free memory of the host, so that the ladder can offload to pinned memory (the last "
              "attempt recomputed modules and offloaded nothing)");
  } else if (shortfall.ladder_off && !could_split(shortfall)) {
    advice.push_back(
        "let the ladder recompute and offload what one row saves (ladder=[..., \"recompute\", "
        "\"offload\"]; activations and temporaries: " +
        format_bytes(bytes) + ")");
  } else if (!mapping) {
    advice.push_back(
        "checkpoint activations (torch.utils.checkpoint; activations and temporaries: " +
        format_bytes(bytes) + ")");
  }
  const bool float32 = shortfall.standing && shortfall.standing->float32 > 0;
  if (float32 && !shortfall.autocast) {
    advice.push_back(std::string("compute in bfloat16 (autocast in the ") +
                     (mapping ? "function)" : "loss function)"));
  }
}

void advise_on_standing(const Shortfall& shortfall, std::vector<std::string>& advice) {
  if (!shortfall.standing || !shortfall.trains) {
    return;
  }
  const auto& standing = *shortfall.standing;
  const auto state = standing.optimizer_state.value_or(0);
  if (worth_it(standing.trainable + state, shortfall)) {
    advice.push_back(
        "freeze parameters that need no training (gradients: " + format_bytes(standing.trainable) +
        ", optimizer state: " + (standing.optimizer_state ? format_bytes(state) : "not known") +
        ")");
    if (shortfall.world_size > 1 && !is_of(shortfall, Shortfall::Of::stages)) {
      advice.push_back("shard the model over the " + std::to_string(shortfall.world_size) +
                       " ranks (FSDP)");
    }
  }
}

/// There would be room if the optimizer's state were not on the device; how much pieces lack is not known.
void advise_on_state(const Shortfall& shortfall, std::vector<std::string>& advice) {
  if (!shortfall.state_may_leave || !shortfall.standing) {
    return;
  }
  const auto state = shortfall.standing->optimizer_state.value_or(0);
  const auto work = work_bytes(shortfall);
  const auto missing = is_of(shortfall, Shortfall::Of::optimizer) && shortfall.limit_bytes
                           ? shortfall.used_bytes + work - *shortfall.limit_bytes
                           : work;
  if (state > missing && !could_split(shortfall)) {
    advice.push_back(std::string("keep the optimizer's state ") +
                     (shortfall.device.is_cpu() ? "in a file" : "on the host") +
                     " (ladder=[..., \"state\"]; optimizer state: " + format_bytes(state) + ")");
  }
}

const char* headline(const Shortfall& shortfall) {
  switch (shortfall.of) {
    case Shortfall::Of::lockstep:
      return "in lockstep no rank may split further by itself: memory ran out";
    case Shortfall::Of::optimizer:
      return "the optimizer's step would run out of memory, whatever the split,";
    case Shortfall::Of::pairs:
      return "the loss over all pairs does not fit, whatever the split,";
    case Shortfall::Of::stages:
      return shortfall.is_fixed
                 ? "the schedule is fixed, so no other number of microbatches was tried,"
                 : "no number of microbatches fits";
    case Shortfall::Of::mapping:
      return could_split(shortfall) ? "no piece that was tried fits"
                                    : "a piece of one row does not fit";
    default:
      return "no split of the batch fits";
  }
}
}  // namespace

std::vector<std::string> advice_for(const Shortfall& shortfall) {
  std::vector<std::string> advice;
  advise_on_splits(shortfall, advice);
  advice.insert(advice.end(), shortfall.on_stage.begin(), shortfall.on_stage.end());
  advise_on_capacity(shortfall, advice);
  advise_on_state(shortfall, advice);
  if (is_of(shortfall, Shortfall::Of::optimizer)) {
    advice.emplace_back("take an optimizer with less state");
  }
  if (is_of(shortfall, Shortfall::Of::pairs)) {
    advice.emplace_back(
        "use a smaller batch, a loss that goes through the pairs in parts, or one over each rank's "
        "own rows (own=True)");
  }
  const auto& standing = shortfall.standing;
  const auto stays =
      standing ? standing->parameters + standing->trainable + standing->optimizer_state.value_or(0)
               : 0;
  if (work_bytes(shortfall) >= stays) {
    advise_on_work(shortfall, advice);
    advise_on_standing(shortfall, advice);
  } else {
    advise_on_standing(shortfall, advice);
    advise_on_work(shortfall, advice);
  }
  advice.emplace_back("use a smaller model or input, or a device with more memory");
  return advice;
}

TooLargeFacts facts_of(const Shortfall& shortfall) {
  TooLargeFacts facts;
  facts.rank = shortfall.rank;
  facts.device = shortfall.device.str();
  for (const auto& attempt : shortfall.attempts) {
    facts.tried.push_back({attempt.pieces, attempt.piece_rows, attempt.peak_bytes});
  }
  facts.limit_bytes = shortfall.limit_bytes;
  facts.advice = advice_for(shortfall);
  int64_t known = 0;
  const auto add = [&](const char* name, int64_t bytes) {
    facts.bytes.emplace_back(name, bytes);
    known += bytes;
  };
  if (const auto& standing = shortfall.standing) {
    add("parameters", standing->parameters);
    add("gradients", standing->gradients);
    if (standing->optimizer_state) {
      add("optimizer state", *standing->optimizer_state);
    }
    add("buffers", standing->buffers);
  }
  add("other tensors", at_least_0(shortfall.used_bytes - known));
  add(is_of(shortfall, Shortfall::Of::optimizer) ? "the optimizer's step"
                                                 : "activations and temporaries",
      work_bytes(shortfall));
  const auto hold = [&](const char* name, const std::optional<int64_t>& bytes) {
    if (bytes) {
      facts.held.emplace_back(name, *bytes);
    }
  };
  hold("this process", shortfall.others.process_bytes);
  hold("others", shortfall.others.others_bytes);
  hold("free", shortfall.others.free_bytes);
  return facts;
}

std::string to_string(const Shortfall& shortfall, const TooLargeFacts& facts) {
  const bool of_optimizer = is_of(shortfall, Shortfall::Of::optimizer);
  TextStream text;
  text << headline(shortfall) << " on rank " << shortfall.rank << " of " << shortfall.world_size
       << " (device: " << facts.device << ", rows: " << shortfall.rows;
  if (is_of(shortfall, Shortfall::Of::mapping)) {
    text << ", done: " << shortfall.rows_done;
  }
  if (!of_optimizer) {
    text << ", retries: " << at_least_0(static_cast<int64_t>(facts.tried.size()) - 1)
         << ", max_retries: " << shortfall.max_retries
         << (shortfall.may_split ? "" : ", batch_norm: refuse, which allows no split");
  }
  text << ")" << (shortfall.where.empty() ? "" : ": memory ran out in the ") << shortfall.where;
  for (size_t i = 0; i < shortfall.attempts.size(); ++i) {
    const auto& tried = shortfall.attempts[i];
    text << (i == 0 ? ".\nTried: " : "; ") << counted(tried.pieces, unit_of(shortfall)) << " of "
         << counted(tried.piece_rows, "row");
    if (!tried.rungs.empty()) {
      text << ", " << to_string(tried.rungs);
    }
    text << " (peak: " << format_peak(tried.peak_bytes) << ")";
  }
  text << (of_optimizer ? ".\nThe peak would be: " : ".\nThe last peak: ") << listed(facts.bytes);
  if (facts.limit_bytes) {
    text << " (limit: " << format_bytes(*facts.limit_bytes) << ")";
  }
  if (!facts.held.empty()) {
    text << ".\nOutside this process's tensors: " << listed(facts.held);
    if (!shortfall.others.where.empty()) {
      text << " (source: " << shortfall.others.where << ")";
    }
  }
  text << ".\nTry next: " << format_numbered(facts.advice);
  if (!of_optimizer) {
    text << ".\nThe last error was: " << shortfall.last_error;
  }
  return text.str();
}

Shortfall shortfall_on(c10::Device device, const std::function<StandingBytes()>& standing_bytes) {
  Shortfall shortfall;
  shortfall.device = device;
  shortfall.autocast = at::autocast::is_autocast_enabled(device.type());
  if (!memory::is_counted(device)) {
    return shortfall;
  }
  const auto now = memory::stats(device);
  if (standing_bytes) {
    shortfall.standing = standing_bytes();
  }
  shortfall.used_bytes = now.used_bytes;
  shortfall.limit_bytes = now.limit_bytes;
  shortfall.others = memory::held_by_others(device);
  return shortfall;
}

BatchTooLarge too_large(Shortfall shortfall) {
  const auto refusal = refusal_in(shortfall.last_error);
  shortfall.fragmented = refusal && remedy_for(*refusal) == Remedy::release_cache;
  auto facts = facts_of(shortfall);
  const auto text = to_string(shortfall, facts);
  return BatchTooLarge(text, std::move(facts));
}

}  // namespace brimful
