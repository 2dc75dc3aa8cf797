// What becomes of a step's attempts: one stands, is repeated with a finer split, or fails the step on all ranks.
#include <brimful/error.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/sizer/pieces.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <sstream>

#include "base/format.h"
#include "sizer/batch_sizer_state.h"
#include "sizer/loss_scale.h"
#include "step/remedy.h"

namespace brimful {
namespace {
// A release waits for the device; finer pieces do not.
constexpr int64_t kStepsBetweenReleases = 16;

/// Tries that this rank's own shortages have cost; those of others have limits of their own.
int64_t own_retries(const Outcome& outcome, int rank) {
  return std::count_if(outcome.attempts.begin(), outcome.attempts.end(), [&](const auto& attempt) {
    return std::find(attempt.ran_out.begin(), attempt.ran_out.end(), rank) != attempt.ran_out.end();
  });
}
}  // namespace

std::optional<Plan> BatchSizer::State::choose_pieces(const StepInput& input, const PieceWork& work,
                                                     Outcome& outcome) {
  outcome.pieces = in_lockstep() ? agreed_.pieces : wanted_pieces(input);
  std::optional<Plan> plan;
  if (input.rows && !input.split && predicts()) {
    const memory::PeakScope peak(options_.device);
    plan = plan_of(input, work, options_.device.is_cpu());
    outcome.pieces = plan ? plan->pieces : wanted_pieces(input);
    outcome.peak_bytes = peak.peak_bytes();
  }
  if (!plan && !in_lockstep() && !input.split && learned_.piece_rows > 0) {
    outcome.pieces =
        learned_.history.coarser(input.rows.value_or(0), outcome.pieces, room(), steps_);
  }
  norms_.require_whole(outcome.pieces);
  return plan;
}

std::vector<int64_t> BatchSizer::State::split_of(int64_t rows, int64_t pieces) {
  return options_.equal_pieces && !in_lockstep()
             ? split_into_few_sizes(rows, split_rows(rows, pieces).front(), learned_.equal_sizes)
             : split_rows(rows, pieces);
}

std::vector<int64_t> BatchSizer::State::next_split(const StepInput& input, const Outcome& outcome) {
  if (input.split && outcome.pieces == std::ssize(*input.split)) {
    return *input.split;
  }
  if (!input.rows && !in_lockstep()) {
    return {};
  }
  return split_of(input.rows.value_or(0), outcome.pieces);
}

void BatchSizer::State::stand(const AttemptResult& result, double ref, Outcome& outcome) {
  const double total = total_weight(result.records);
  group_.accept(total > 0 ? ref / total : 1, total > 0);
  agreed_.last_total = total > 0 ? total : agreed_.last_total;
  outcome.loss = mean_loss(result.records);
  outcome.weight = total;
  outcome.last = nobody_continues(result.records);
  for (const auto& record : result.records) {
    outcome.work_ms.push_back(record.work_ms);
  }
  outcome.pieces = std::ssize(outcome.split);
}

Outcome BatchSizer::State::run(const StepInput& input, const PieceWork& work) {
  learned_.used_before = memory::stats(options_.device).used_bytes;
  Outcome outcome;
  StepGroup::Attempt attempt;
  attempt.lockstep = in_lockstep();
  attempt.buffer_source = agreed_.buffer_source;
  attempt.ref = std::isfinite(agreed_.total) && agreed_.total > 0 ? agreed_.total
                : agreed_.last_total > 0                          ? agreed_.last_total
                                                                  : 1;
  std::optional<ValueOnHost> scale;
  if (options_.scaler != nullptr && options_.scaler->enabled() && group_.world_size() > 1) {
    scale.emplace(options_.scaler->tensors(options_.device).first);
  }
  attempt.mark = [&] { return mark_of(attempt.ref, scale ? scale->get() : 1, input.accumulate); };
  attempt.record = agreed_.next;
  attempt.record.verdict = input.rows ? Status::ok : Status::no_data;
  owed_ = true;  // the others wait in their step
  const auto plan = choose_pieces(input, work, outcome);
  bool release = false;
  attempt.same_split = [&](const std::string& shortage) {
    release = release_helps(shortage, options_.device);
    return release &&
           (!learned_.released_step || steps_ - *learned_.released_step >= kStepsBetweenReleases);
  };
  attempt.finish_buffers = [&] { norms_.finish(); };
  int64_t next_piece = 0;
  const auto watched =
      PieceWork{[&](int64_t first, int64_t end) {
                  auto piece = norms_.forward(next_piece++, std::ssize(attempt.split),
                                              [&] { return work.forward(first, end); });
                  own_weights_ = own_weights_ || piece.weight != static_cast<double>(end - first);
                  return piece;
                },
                scaled_backward(work.backward, options_.scaler)};
  while (true) {
    const memory::PeakScope peak(options_.device);
    outcome.split = attempt.split = next_split(input, outcome);
    attempt.retries_left = own_retries(outcome, group_.rank()) < options_.max_retries;
    attempt.can_split = std::ssize(attempt.split) < input.rows.value_or(0) && norms_.may_split();
    owed_ = false;
    next_piece = 0;
    recorder_.begin_attempt();
    const auto result = [&] {
      const BatchNorms::Scope norms(norms_);
      return group_.run(attempt, watched);
    }();
    const auto attempt_peak = peak.peak_bytes();
    recorder_.end_attempt(std::ssize(outcome.split), largest_piece(outcome.split), attempt_peak,
                          result.own == Status::out_of_memory);
    const bool stands = settle_attempt(result, input, outcome, attempt_peak);
    if (stands) {
      stand(result, attempt.ref, outcome);
    }
    outcome.peak_bytes = std::max(outcome.peak_bytes, peak.peak_bytes());
    if (stands) {
      note_peak(input, outcome);
      recorder_.end_step(true, checked_limit_);
      return outcome;
    }
    owed_ = true;
    group_.discard();
    transaction_.restore();
    batch_.restore();
    ++outcome.retries;
    recorder_.note_retry(release);
    if (release) {  // only now: the gradients of the attempt are gone
      memory::release_cached(options_.device);
      outcome.attempts.back().cache_released = true;
      learned_.released_step = steps_;
      release = false;
    }
    note_shortfall(result, plan, input.kind);
  }
}

bool BatchSizer::State::settle_attempt(const AttemptResult& result, const StepInput& input,
                                       Outcome& outcome, int64_t peak_bytes) {
  AttemptNote note;
  note.pieces = static_cast<int64_t>(outcome.split.size());
  note.piece_rows = largest_piece(outcome.split);
  note.peak_bytes = peak_bytes;
  note.buckets_left = result.buckets_left;
  note.alone = result.retry_alone;
  if (result.retry_alone) {
    note.ran_out = {group_.rank()};
    outcome.attempts.push_back(note);
    refine(result, *input.rows, outcome);
    return false;
  }
  agreed_.at_end = !result.records.empty() && nobody_continues(result.records);
  if (result.own == Status::error) {
    std::rethrow_exception(result.error);
  }
  const auto verdict = worst(result.records);
  if (result.records.empty() || is_failure(verdict)) {
    outcome.attempts.push_back(note);
    throw_failure(result, input, outcome);
  }
  if (verdict != Status::retry) {
    if (const auto words = group_.divergence(); !words.empty()) {
      throw PlanMismatch(words);  // on all ranks
    }
    require_same_mark(result.records);
    require_weight(result.records);
    outcome.attempts.push_back(note);
    adopt(result.records);
    return true;
  }
  note.ran_out = ranks_with(result.records, Status::retry);
  outcome.attempts.push_back(note);
  if (result.own == Status::out_of_memory) {
    refine(result, *input.rows, outcome);
  } else {
    log(LogLevel::info,
        "step " + std::to_string(steps_) + " is repeated for rank " + format_list(note.ran_out));
  }
  return false;
}

void BatchSizer::State::refine(const AttemptResult& result, int64_t rows, Outcome& outcome) {
  if (result.same_split) {
    log(LogLevel::warning, "rank " + std::to_string(group_.rank()) + " ran out of memory in step " +
                               std::to_string(steps_) +
                               ", but within the device's capacity: torch's cache is released and "
                               "the step repeated as it was");
    return;
  }
  const auto before = std::ssize(outcome.split);
  const auto most = largest_piece(outcome.split);
  learned_.history.note_failure(most, before, room(), steps_);
  const auto pieces = options_.equal_pieces ? pieces_for(rows, most) : before;
  outcome.pieces = std::max(
      learned_.history.finer(rows, pieces, room()),
      finer_within(rows, pieces, own_retries(outcome, group_.rank()), options_.max_retries));
  learned_.piece_rows = pieces_for(rows, outcome.pieces);
  std::ostringstream line;
  line << "rank " << group_.rank() << " ran out of memory in step " << steps_ << ": a batch of "
       << rows << " is repeated in " << split_of(rows, outcome.pieces).size()
       << " pieces instead of " << before;
  log(LogLevel::warning, line.str());
}

}  // namespace brimful
