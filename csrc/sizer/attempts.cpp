// What becomes of a step's attempts: one stands, is repeated with a finer split, or fails the step on all ranks.
#include <brimful/log.h>
#include <brimful/memory/stats.h>
#include <brimful/step/pieces.h>

#include <algorithm>
#include <iomanip>
#include <iterator>

#include "base/format.h"
#include "base/text_stream.h"
#include "sizer/batch_sizer_state.h"
#include "sizer/climb.h"
#include "sizer/pair_run.h"
#include "step/accept_late.h"
#include "step/agreement.h"
#include "step/repetition.h"

namespace brimful {
std::optional<Plan> BatchSizer::State::choose_pieces(const StepInput& input,
                                                     const PieceWork* rehearsed, Outcome& outcome) {
  outcome.pieces =
      splitting_.in_lockstep() ? engine_.agreed().pieces : splitting_.wanted_pieces(input);
  std::optional<Plan> plan;
  if (input.rows && !input.split && rehearsed != nullptr && forecaster_.predicts()) {
    const memory::PeakScope peak(options_.device);
    plan = forecaster_.plan_of(input, *rehearsed, options_.device.is_cpu());
    outcome.pieces = plan ? plan->pieces : splitting_.wanted_pieces(input);
    outcome.peak_bytes = peak.peak_bytes();
  }
  if (!plan && !splitting_.in_lockstep() && !input.split && input.rows && !input.by_length) {
    outcome.pieces = splitting_.by_rows().first(*input.rows, outcome.pieces).pieces;
  }
  const auto* given = Splitting::given(input, plan);
  outcome.pieces =
      input.by_length ? splitting_.first_plan(input, outcome.pieces, given).pieces : outcome.pieces;
  norms_.require_whole(outcome.pieces);
  return plan;
}

void BatchSizer::State::stand(const AttemptResult& result, const Divisor& ref, bool of_pairs,
                              Outcome& outcome) {
  const double total = total_weight(result.records);
  const auto& late = engine_.group().late_sums();
  if (const bool is_late = has_late_weight(result.records); is_late || ref.late.defined()) {
    const bool checks = options_.scaler == nullptr || !options_.scaler->enabled();
    accept_late(engine_, result, ref, checks);
  } else {
    engine_.group().accept(!of_pairs && total > 0 ? ref.value / total : 1, total > 0);
    if (total > 0) {
      engine_.note_total(total);
    }
  }
  outcome.loss =
      late ? LateNumber(late, &LateSums::mean_loss) : LateNumber(mean_loss(result.records));
  outcome.weight =
      has_late_weight(result.records) ? LateNumber(late, &LateSums::weight) : LateNumber(total);
  outcome.last = engine_.agreed().at_end;
  outcome.stop = stops(result.records);
  outcome.regroup = regroups(result.records);
  for (const auto& record : result.records) {
    outcome.work_ms.push_back(record.work_ms);
  }
  outcome.pieces = std::ssize(outcome.split);
}

Ended BatchSizer::State::settle_attempt(const AttemptResult& result, const StepInput& input,
                                        AttemptNote& note, const Retry& retry,
                                        const PairRun* pairs) {
  Ended again{result.same_split ? Ended::How::as_it_was : Ended::How::ran_out, options_.device};
  if (result.retry_alone) {
    note.ran_out = {engine_.group().rank()};
    return again;
  }
  engine_.note_end(result.records);
  if (result.own == Status::error) {
    std::rethrow_exception(result.error);
  }
  const auto verdict = worst(result.records);
  if (result.records.empty() || is_failure(verdict)) {
    throw_failure(result, input, retry, pairs);
  }
  if (verdict != Status::retry) {
    if (const auto divergence = engine_.group().divergence(); !divergence.empty()) {
      throw PlanMismatch(divergence);  // on all ranks
    }
    require_alike(result.records);
    if (pairs != nullptr) {
      pairs->require_alike(engine_.group().with_losses(result.records));
    }
    adopt(result.records);
    return {};
  }
  note.ran_out = ranks_with(result.records, Status::retry);
  return result.own == Status::out_of_memory ? again : Ended{Ended::How::for_others};
}

void BatchSizer::State::log_shortage(const Ended& ended, const Outcome& outcome,
                                     const StepInput& input, const Retry& retry) {
  const auto step = engine_.name();
  if (ended.how == Ended::How::for_others) {
    log(LogLevel::info,
        step + " is repeated for rank " + format_list(retry.attempts().back().ran_out));
    return;
  }
  log_repetition(
      {.rank = engine_.group().rank(),
       .what = step,
       .reason = ended.next_text,
       .rows = input.rows.value_or(0),
       .as_it_was = ended.how == Ended::How::as_it_was,
       .pieces = std::ssize(outcome.split),
       .more = ended.pieces > 0 ? ended.pieces
               : ended.how == Ended::How::ran_out && !ended.next
                   ? std::ssize(splitting_.split_by(retry.next(options_.device), input, nullptr))
                   : 0},
      retry.attempts().back());
}

void BatchSizer::State::require_alike(const std::vector<ControlRecord>& records) {
  const auto step = engine_.name();
  if (!ranks_with_another_ref(records).empty()) {
    engine_.note_total(0);  // the next step works
    require_same_mark(records, step);
  }
  const auto with_data = ranks_with(records, Status::ok);
  TORCH_CHECK_VALUE(with_data.empty() || has_late_weight(records) || total_weight(records) > 0,
                    nothing_counts(step, 0, "ranks with data: " + format_list(with_data)));
}

void BatchSizer::State::log_rungs(const Outcome& outcome, const AttemptNote& last,
                                  const Climb& climb) {
  if (outcome.rungs == ladder_.logged || outcome.split.empty()) {
    return;
  }
  ladder_.logged = outcome.rungs;
  TextStream text;
  text << engine_.name() << ": " << to_string(outcome.rungs);
  if (const auto cost = climb.cost(); cost && climb.forward_ms() > 0) {
    text << std::fixed << std::setprecision(2) << ", " << 1 + cost->more_ms / climb.forward_ms()
         << "x forward time";
  }
  text << ", peak " << format_bytes(last.peak_bytes);
  if (checked_.limit) {
    text << " of " << format_bytes(*checked_.limit);
  }
  log(LogLevel::info, text.str());
}

void BatchSizer::State::note_peak(const StepInput& input, const Outcome& outcome) {
  if (outcome.retries > 0 || outcome.split.empty() || !outcome.rungs.empty()) {
    return;  // the peak is that of what was repeated, too
  }
  splitting_.policy_of(input).note_fit(Splitting::plan_as_run(input, outcome.split),
                                       {{options_.device, outcome.peak_bytes}}, !input.split);
}

}  // namespace brimful
