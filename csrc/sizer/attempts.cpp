// What becomes of a step's attempts: one stands, is repeated with a finer split, or fails the step on all ranks.
#include <brimful/error.h>
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/sizer/pieces.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <iterator>

#include "base/format.h"
#include "base/text_stream.h"
#include "sizer/batch_sizer_state.h"
#include "sizer/climb.h"
#include "sizer/loss_scale.h"
#include "sizer/pair_run.h"
#include "step/garbage.h"
#include "step/remedy.h"

namespace brimful {
namespace {
// A release waits for the device; finer pieces do not.
constexpr int64_t kStepsBetweenReleases = 16;

int64_t most_pieces(int64_t rows, int64_t least_rows) {
  return std::max<int64_t>(rows / least_rows, 1);
}

const std::vector<int64_t>* given_split(const StepInput& input, const std::optional<Plan>& plan) {
  return input.split ? &*input.split : plan && !plan->split.empty() ? &plan->split : nullptr;
}
}  // namespace

std::optional<Plan> BatchSizer::State::choose_pieces(const StepInput& input,
                                                     const PieceWork* rehearsed, Outcome& outcome) {
  outcome.pieces = in_lockstep() ? agreed_.pieces : wanted_pieces(input);
  std::optional<Plan> plan;
  if (input.rows && !input.split && rehearsed != nullptr && predicts()) {
    const memory::PeakScope peak(options_.device);
    plan = plan_of(input, *rehearsed, options_.device.is_cpu());
    outcome.pieces = plan ? plan->pieces : wanted_pieces(input);
    outcome.peak_bytes = peak.peak_bytes();
  }
  if (!plan && !in_lockstep() && !input.split && input.rows && !input.by_length) {
    outcome.pieces = policy_.first(*input.rows, outcome.pieces).pieces;
  }
  const auto* given = given_split(input, plan);
  outcome.pieces =
      input.by_length ? first_plan(input, outcome.pieces, given).pieces : outcome.pieces;
  norms_.require_whole(outcome.pieces);
  return plan;
}

std::vector<int64_t> BatchSizer::State::split_of(int64_t rows, int64_t pieces) {
  return options_.equal_pieces && !in_lockstep()
             ? split_into_few_sizes(rows, split_rows(rows, pieces).front(), splitting_.equal_sizes)
             : split_rows(rows, pieces);
}

std::vector<int64_t> BatchSizer::State::split_by(const ExecutionPlan& plan, const StepInput& input,
                                                 const std::vector<int64_t>* given) {
  if (input.by_length) {
    return split_within(input, plan.piece_rows, given);
  }
  if (input.split && plan.pieces == std::ssize(*input.split)) {
    return *input.split;
  }
  if (!input.rows && !in_lockstep()) {
    return {};
  }
  const auto rows = input.rows.value_or(0);
  return split_of(rows, in_lockstep()
                            ? plan.pieces
                            : std::min(plan.pieces, most_pieces(rows, splitting_.least_rows)));
}

void BatchSizer::State::stand(const AttemptResult& result, double scale, Outcome& outcome) {
  const double total = total_weight(result.records);
  group_.accept(scale, total > 0);
  agreed_.last_total = total > 0 ? total : agreed_.last_total;
  outcome.loss = mean_loss(result.records);
  outcome.weight = total;
  outcome.last = agreed_.at_end;
  outcome.stop = stops(result.records);
  outcome.regroup = regroups(result.records);
  for (const auto& record : result.records) {
    outcome.work_ms.push_back(record.work_ms);
  }
  outcome.pieces = std::ssize(outcome.split);
}

/// A step under way, attempt by attempt.
class BatchSizer::State::Running {
 public:
  Running(State& sizer, const StepInput& input, const PieceWork& work, PairRun* pairs)
      : s_(sizer),
        input_(input),
        work_(work),
        pairs_(pairs),
        climb_(sizer.ladder_.ladder, input, work,
               [&sizer, &input] { return sizer.policy_of(input).room(sizer.options_.device); }),
        clock_(sizer.options_.device) {
    announce();
    s_.agreed_.owed = true;  // the others wait in their step
    plan_ = s_.choose_pieces(input_, pairs_ == nullptr ? &work_ : nullptr, outcome_);
    attempt_.prologue = pairs_;
    attempt_.same_split = [this](const std::string& shortage) {
      if (pairs_ != nullptr &&
          pairs_->in_loss()) {  // once more: something else may have had the room
        attempt_.can_shrink = false;
        return !std::exchange(loss_ran_out_, true) || garbage_.helps(s_.options_.device);
      }
      release_ = release_helps(shortage, s_.options_.device);
      return (release_ &&
              (!s_.released_step_ || s_.steps_ - *s_.released_step_ >= kStepsBetweenReleases)) ||
             garbage_.helps(s_.options_.device);
    };
    attempt_.too_fine = [this](const std::string& error) {
      const bool is = is_too_fine(error);
      s_.splitting_.least_rows = is ? 2 : s_.splitting_.least_rows;
      attempt_.can_shrink = attempt_.can_shrink || is;
      return is;
    };
    attempt_.finish_buffers = [this] { s_.norms_.finish(); };
    attempt_.start_over = [this] { return climb_.is_rejected(); };
  }

  Outcome run() {
    auto first = s_.first_plan(input_, outcome_.pieces, given_split(input_, plan_));
    first.rungs = climb_.first(s_.is_finest(input_, first.pieces));
    Retry retry(s_.policy_of(input_), units_of(input_), s_.options_.max_retries, std::move(first));
    retry.run([&] { return run_once(retry); });
    s_.note_peak(input_, outcome_);
    s_.log_rungs(outcome_, climb_);
    s_.recorder_.end_step(true, s_.checked_.limit);
    return std::move(outcome_);
  }

 private:
  void announce() {
    const auto& agreed = s_.agreed_;
    attempt_.lockstep = s_.in_lockstep();
    attempt_.buffer_source = agreed.buffer_source;
    attempt_.ref = std::isfinite(agreed.total) && agreed.total > 0 ? agreed.total
                   : agreed.last_total > 0                         ? agreed.last_total
                                                                   : 1;
    auto* const scaler = s_.options_.scaler;
    if (scaler != nullptr && scaler->enabled() && s_.group_.world_size() > 1) {
      scale_.emplace(scaler->tensors(s_.options_.device).first);
    }
    attempt_.mark = [this] {
      return mark_of(attempt_.ref, scale_ ? scale_->get() : 1, input_.accumulate);
    };
    attempt_.record = agreed.next;
    attempt_.record.verdict = input_.rows ? Status::ok : Status::no_data;
  }

  PieceLoss forward(int64_t first, int64_t end) {
    clock_.begin_piece(first, end);
    const auto on_rungs = climb_.forward();
    auto piece = s_.norms_.forward(next_piece_++, std::ssize(attempt_.split),
                                   [&] { return work_.forward(first, end); });
    s_.own_weights_ = s_.own_weights_ || piece.weight != static_cast<double>(end - first);
    return piece;
  }

  AttemptResult run_pieces(const Retry& retry) {
    outcome_.split = attempt_.split = s_.split_by(retry.plan(), input_, given_split(input_, plan_));
    const bool finest = s_.is_finest(input_, std::ssize(attempt_.split));
    climb_.begin_attempt(retry.plan().rungs, finest, s_.options_.max_retries > 0);
    attempt_.retries_left = retry.may_repeat() || climb_.may_start_over();
    attempt_.can_shrink = !finest || climb_.may_go_on();
    s_.agreed_.owed = false;
    next_piece_ = 0;
    s_.recorder_.begin_attempt();
    clock_.begin_attempt();
    auto backward = pairs_ != nullptr ? work_.backward  // it has scaled the loss itself
                                      : scaled_backward(work_.backward, s_.options_.scaler);
    const PieceWork watched{[this](int64_t first, int64_t end) { return forward(first, end); },
                            [this, backward](const at::Tensor& loss, const at::Tensor& gradient) {
                              backward(loss, gradient);
                              clock_.end_piece();
                            }};
    if (pairs_ != nullptr) {
      pairs_->begin_attempt(attempt_.split);
    }
    auto result = [&] {
      const auto as_before = c10::make_scope_exit([&] { s_.norms_.after_step(); });
      return s_.group_.run(attempt_, watched);
    }();
    climb_.end_attempt(result.own == Status::ok);
    if (result.own == Status::ok && input_.by_length && !input_.by_length->packed &&
        outcome_.rungs.empty()) {
      note_times();
    }
    return result;
  }

  void note_times() {
    auto& known = s_.splitting_.by_length;
    if (std::exchange(known.warm, true)) {
      clock_.end_attempt(known.times, input_.by_length->lengths, outcome_.split);
    }
  }

  Ended run_once(Retry& retry) {
    const memory::PeakScope peak(s_.options_.device);
    const auto result = run_pieces(retry);
    const auto attempt_peak = peak.peak_bytes();
    s_.recorder_.end_attempt(std::ssize(outcome_.split), largest_piece(outcome_.split),
                             attempt_peak, result.own == Status::out_of_memory);
    outcome_.rungs = climb_.named();
    auto ended = s_.settle_attempt(result, input_, outcome_, attempt_peak, pairs_);
    if (ended.how == Ended::How::stands) {
      s_.stand(result, scale_of(result.records), outcome_);
      outcome_.order = input_.by_length ? input_.by_length->order : outcome_.order;
    } else {
      if (ended.how == Ended::How::ran_out) {
        retry.set_plan(plan_as_run(input_, outcome_.split, retry.plan().rungs));  // some are uneven
      }
      undo();
      climb_.follow(ended, retry.plan());
      s_.log_shortage(ended, outcome_, input_, retry);
      s_.note_shortfall(result, plan_, input_.kind);
    }
    outcome_.peak_bytes = std::max(outcome_.peak_bytes, peak.peak_bytes());
    return ended;
  }

  /// A piece of one row, which only the sizer chose, has failed by an error of torch's normalisations that two rows have not.
  bool is_too_fine(const std::string& error) const {
    const auto& split = attempt_.split;
    return outcome_.retries > 0 && s_.splitting_.least_rows == 1 && !s_.in_lockstep() &&
           !input_.split && !input_.by_length && input_.rows.value_or(0) > 1 &&
           std::find(split.begin(), split.end(), 1) != split.end() &&
           error.find("Expected more than 1 value per channel when training") != std::string::npos;
  }

  double scale_of(const std::vector<ControlRecord>& records) const {
    const double total = total_weight(records);
    return pairs_ == nullptr && total > 0 ? attempt_.ref / total : 1;
  }

  void undo() {
    s_.agreed_.owed = true;
    s_.group_.discard();
    s_.transaction_.restore();
    s_.batch_.restore();
    ++outcome_.retries;
    auto& note = outcome_.attempts.back();
    note.garbage_bytes = garbage_.take_freed_bytes();
    s_.recorder_.note_retry(release_, note.garbage_bytes > 0);
    if (std::exchange(release_, false)) {  // only now: the gradients of the attempt are gone
      memory::release_cached(s_.options_.device);
      note.cache_released = true;
      s_.released_step_ = s_.steps_;
    }
  }

  State& s_;
  const StepInput& input_;
  const PieceWork& work_;
  PairRun* pairs_;
  Climb climb_;
  Outcome outcome_;
  StepGroup::Attempt attempt_;
  std::optional<ValueOnHost> scale_;
  std::optional<Plan> plan_;
  bool release_ = false;
  bool loss_ran_out_ = false;
  GarbageRemedy garbage_;
  int64_t next_piece_ = 0;
  PieceClock clock_;
};

Outcome BatchSizer::State::run(const StepInput& input, const PieceWork& work, PairRun* pairs) {
  policy_of(input).measure();
  return Running(*this, input, work, pairs).run();
}

Ended BatchSizer::State::settle_attempt(const AttemptResult& result, const StepInput& input,
                                        Outcome& outcome, int64_t peak_bytes,
                                        const PairRun* pairs) {
  Ended again{result.same_split ? Ended::How::as_it_was : Ended::How::ran_out, options_.device};
  AttemptNote note;
  note.pieces = static_cast<int64_t>(outcome.split.size());
  note.piece_rows = largest_piece(outcome.split);
  note.peak_bytes = peak_bytes;
  note.rungs = outcome.rungs;
  note.buckets_launched = result.buckets_launched;
  note.alone = result.retry_alone;
  if (result.retry_alone) {
    note.ran_out = {group_.rank()};
    outcome.attempts.push_back(note);
    return again;
  }
  agreed_.at_end = !result.records.empty() && no_rank_steps(result.records);
  if (result.own == Status::error) {
    std::rethrow_exception(result.error);
  }
  const auto verdict = worst(result.records);
  if (result.records.empty() || is_failure(verdict)) {
    outcome.attempts.push_back(note);
    throw_failure(result, input, outcome, pairs);
  }
  if (verdict != Status::retry) {
    if (const auto divergence = group_.divergence(); !divergence.empty()) {
      throw PlanMismatch(divergence);  // on all ranks
    }
    require_same_mark(result.records);
    require_weight(result.records);
    if (pairs != nullptr) {
      pairs->require_alike(result.records);
    }
    outcome.attempts.push_back(note);
    adopt(result.records);
    return {};
  }
  note.ran_out = ranks_with(result.records, Status::retry);
  outcome.attempts.push_back(note);
  return result.own == Status::out_of_memory ? again : Ended{Ended::How::for_others};
}

void BatchSizer::State::log_shortage(const Ended& ended, const Outcome& outcome,
                                     const StepInput& input, const Retry& retry) {
  const auto here = "rank " + std::to_string(group_.rank()) + " ran out of memory in step " +
                    std::to_string(steps_);
  if (ended.how == Ended::How::for_others) {
    log(LogLevel::info, "step " + std::to_string(steps_) + " is repeated for rank " +
                            format_list(outcome.attempts.back().ran_out));
  } else if (ended.next) {
    log(LogLevel::warning, "rank " + std::to_string(group_.rank()) + ", step " +
                               std::to_string(steps_) + ": " + ended.next_text);
  } else if (ended.how == Ended::How::as_it_was) {
    const auto& note = outcome.attempts.back();
    log(LogLevel::warning,
        here +
            (note.cache_released ? ", but within the device's capacity: torch's cache is released"
                                 : ": " + format_bytes(note.garbage_bytes) +
                                       " of garbage in reference cycles is freed") +
            " and the step repeated as it was");
  } else {
    log(LogLevel::warning,
        here + ": a batch of " + std::to_string(input.rows.value_or(0)) + " is repeated in " +
            std::to_string(split_by(retry.next(options_.device), input, nullptr).size()) +
            " pieces instead of " + std::to_string(outcome.split.size()));
  }
}

bool BatchSizer::State::is_finest(const StepInput& input, int64_t pieces) const {
  const auto rows = input.rows.value_or(0);
  return input.whole || pieces >= std::min(rows, most_pieces(rows, splitting_.least_rows)) ||
         !norms_.may_split();
}

void BatchSizer::State::log_rungs(const Outcome& outcome, const Climb& climb) {
  if (outcome.rungs == ladder_.logged || outcome.split.empty()) {
    return;
  }
  ladder_.logged = outcome.rungs;
  TextStream text;
  text << "step " << steps_ << ": " << to_string(outcome.rungs);
  if (const auto cost = climb.cost(); cost && climb.forward_ms() > 0) {
    text << std::fixed << std::setprecision(2) << ", " << 1 + cost->more_ms / climb.forward_ms()
         << "x forward time";
  }
  text << ", peak " << format_bytes(outcome.attempts.back().peak_bytes);
  if (checked_.limit) {
    text << " of " << format_bytes(*checked_.limit);
  }
  log(LogLevel::info, text.str());
}

void BatchSizer::State::note_peak(const StepInput& input, const Outcome& outcome) {
  if (outcome.retries > 0 || outcome.split.empty() || !outcome.rungs.empty()) {
    return;  // the peak is that of what was repeated, too
  }
  policy_of(input).note_fit(plan_as_run(input, outcome.split),
                            {{options_.device, outcome.peak_bytes}}, !input.split);
}

}  // namespace brimful
