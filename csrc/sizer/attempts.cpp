// What becomes of a step's attempts: one stands, is repeated with a finer split, or fails the step on all ranks.
#include <brimful/error.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/sizer/pieces.h>

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <iterator>
#include <sstream>

#include "base/format.h"
#include "sizer/batch_sizer_state.h"
#include "sizer/climb.h"
#include "sizer/loss_scale.h"
#include "step/remedy.h"

namespace brimful {
namespace {
// A release waits for the device; finer pieces do not.
constexpr int64_t kStepsBetweenReleases = 16;

ExecutionPlan plan_as_run(const std::vector<int64_t>& split, ladder::Rungs rungs = {}) {
  return {std::ssize(split), largest_piece(split), std::move(rungs)};
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
  if (!plan && !in_lockstep() && !input.split && input.rows) {
    outcome.pieces = policy_.first(*input.rows, outcome.pieces).pieces;
  }
  norms_.require_whole(outcome.pieces);
  return plan;
}

std::vector<int64_t> BatchSizer::State::split_of(int64_t rows, int64_t pieces) {
  return options_.equal_pieces && !in_lockstep()
             ? split_into_few_sizes(rows, split_rows(rows, pieces).front(), equal_sizes_)
             : split_rows(rows, pieces);
}

std::vector<int64_t> BatchSizer::State::split_by(const ExecutionPlan& plan,
                                                 const StepInput& input) {
  if (input.split && plan.pieces == std::ssize(*input.split)) {
    return *input.split;
  }
  if (!input.rows && !in_lockstep()) {
    return {};
  }
  return split_of(input.rows.value_or(0), plan.pieces);
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
  policy_.measure();
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
    return release && (!released_step_ || steps_ - *released_step_ >= kStepsBetweenReleases);
  };
  attempt.finish_buffers = [&] { norms_.finish(); };
  int64_t next_piece = 0;
  Climb climb(ladder_, input, work, [&] { return policy_.room(options_.device); });
  attempt.start_over = [&] { return climb.is_rejected(); };
  const auto watched =
      PieceWork{[&](int64_t first, int64_t end) {
                  const auto on_rungs = climb.forward();
                  auto piece = norms_.forward(next_piece++, std::ssize(attempt.split),
                                              [&] { return work.forward(first, end); });
                  own_weights_ = own_weights_ || piece.weight != static_cast<double>(end - first);
                  return piece;
                },
                scaled_backward(work.backward, options_.scaler)};
  auto first = ExecutionPlan::in_pieces(input.rows.value_or(0), outcome.pieces);
  first.rungs = climb.first(is_finest(input, first.pieces));
  Retry retry(policy_, input.rows.value_or(0), options_.max_retries, std::move(first));
  retry.run([&]() -> Ended {
    const memory::PeakScope peak(options_.device);
    outcome.split = attempt.split = split_by(retry.plan(), input);
    const bool finest = is_finest(input, std::ssize(attempt.split));
    climb.begin_attempt(retry.plan().rungs, finest);
    attempt.retries_left = retry.may_repeat() || climb.may_go_on();
    attempt.can_shrink = !finest || climb.may_go_on();
    owed_ = false;
    next_piece = 0;
    recorder_.begin_attempt();
    const auto result = [&] {
      const BatchNorms::Scope norms(norms_);
      return group_.run(attempt, watched);
    }();
    climb.end_attempt(result.own == Status::ok);
    const auto attempt_peak = peak.peak_bytes();
    recorder_.end_attempt(std::ssize(outcome.split), largest_piece(outcome.split), attempt_peak,
                          result.own == Status::out_of_memory);
    auto ended = settle_attempt(result, input, outcome, attempt_peak);
    if (ended.how == Ended::How::stands) {
      outcome.rungs = climb.named();
      stand(result, attempt.ref, outcome);
      outcome.peak_bytes = std::max(outcome.peak_bytes, peak.peak_bytes());
      return ended;
    }
    if (ended.how == Ended::How::ran_out) {
      retry.set_plan(plan_as_run(outcome.split, retry.plan().rungs));  // some are uneven
    }
    climb.follow(ended, retry.plan());
    log_shortage(ended, outcome, input.rows.value_or(0), retry);
    outcome.peak_bytes = std::max(outcome.peak_bytes, peak.peak_bytes());
    owed_ = true;
    group_.discard();
    transaction_.restore();
    batch_.restore();
    ++outcome.retries;
    recorder_.note_retry(release);
    if (release) {  // only now: the gradients of the attempt are gone
      memory::release_cached(options_.device);
      outcome.attempts.back().cache_released = true;
      released_step_ = steps_;
      release = false;
    }
    note_shortfall(result, plan, input.kind);
    return ended;
  });
  note_peak(input, outcome);
  log_rungs(outcome, climb);
  recorder_.end_step(true, checked_limit_);
  return outcome;
}

Ended BatchSizer::State::settle_attempt(const AttemptResult& result, const StepInput& input,
                                        Outcome& outcome, int64_t peak_bytes) {
  const Ended again{result.same_split ? Ended::How::as_it_was : Ended::How::ran_out,
                    options_.device};
  AttemptNote note;
  note.pieces = static_cast<int64_t>(outcome.split.size());
  note.piece_rows = largest_piece(outcome.split);
  note.peak_bytes = peak_bytes;
  note.buckets_left = result.buckets_left;
  note.alone = result.retry_alone;
  if (result.retry_alone) {
    note.ran_out = {group_.rank()};
    outcome.attempts.push_back(note);
    return again;
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
    return {};
  }
  note.ran_out = ranks_with(result.records, Status::retry);
  outcome.attempts.push_back(note);
  return result.own == Status::out_of_memory ? again : Ended{Ended::How::for_others};
}

void BatchSizer::State::log_shortage(const Ended& ended, const Outcome& outcome, int64_t rows,
                                     const Retry& retry) {
  const auto here = "rank " + std::to_string(group_.rank()) + " ran out of memory in step " +
                    std::to_string(steps_);
  if (ended.how == Ended::How::for_others) {
    log(LogLevel::info, "step " + std::to_string(steps_) + " is repeated for rank " +
                            format_list(outcome.attempts.back().ran_out));
  } else if (ended.next) {
    log(LogLevel::warning, "rank " + std::to_string(group_.rank()) + ", step " +
                               std::to_string(steps_) + ": " + ended.next_text);
  } else if (ended.how == Ended::How::as_it_was) {
    log(LogLevel::warning, here +
                               ", but within the device's capacity: torch's cache is released and "
                               "the step repeated as it was");
  } else {
    log(LogLevel::warning,
        here + ": a batch of " + std::to_string(rows) + " is repeated in " +
            std::to_string(split_of(rows, retry.next(options_.device).pieces).size()) +
            " pieces instead of " + std::to_string(outcome.split.size()));
  }
}

bool BatchSizer::State::is_finest(const StepInput& input, int64_t pieces) const {
  return pieces >= input.rows.value_or(0) || !norms_.may_split();
}

void BatchSizer::State::log_rungs(const Outcome& outcome, const Climb& climb) {
  if (outcome.rungs == logged_rungs_ || outcome.split.empty()) {
    return;
  }
  logged_rungs_ = outcome.rungs;
  std::ostringstream text;
  text << "step " << steps_ << ": " << to_string(outcome.rungs);
  if (const auto cost = climb.cost(); cost && climb.forward_ms() > 0) {
    text << std::fixed << std::setprecision(2) << ", " << 1 + cost->more_ms / climb.forward_ms()
         << "x forward time";
  }
  text << ", peak " << format_bytes(outcome.attempts.back().peak_bytes);
  if (checked_limit_) {
    text << " of " << format_bytes(*checked_limit_);
  }
  log(LogLevel::info, text.str());
}

void BatchSizer::State::note_peak(const StepInput& input, const Outcome& outcome) {
  if (outcome.retries > 0 || outcome.split.empty() || !outcome.rungs.empty()) {
    return;  // the peak is that of what was repeated, too
  }
  policy_.note_fit(plan_as_run(outcome.split), {{options_.device, outcome.peak_bytes}},
                   !input.split);
}

}  // namespace brimful
