// Steps whose rows are in order of length: pieces are chosen by tokens, bytes and time in place of rows.
#include "sizer/by_length.h"

#include <brimful/memory/stats.h>
#include <brimful/step/pieces.h>

#include <algorithm>

#include "sizer/batch_sizer_state.h"
#include "sizer/rehearse.h"
#include "sizer/step_trace.h"
#include "step/kept_gradients.h"

namespace brimful {
namespace {
/// Of a piece that has these, with its padding if it has any.
int64_t most_tokens_of(const RowLengths& rows, const std::vector<int64_t>& split) {
  return rows.packed ? largest_packed_tokens(rows.lengths, split)
                     : largest_tokens(rows.lengths, split);
}
}  // namespace

int64_t BatchSizer::State::units_of(const StepInput& input) {
  const auto rows = input.rows.value_or(0);
  return input.by_length && rows > 0 ? most_tokens_of(*input.by_length, {rows}) : rows;
}

ExecutionPlan BatchSizer::State::plan_as_run(const StepInput& input,
                                             const std::vector<int64_t>& split, Rungs rungs) {
  const auto most =
      input.by_length ? most_tokens_of(*input.by_length, split) : largest_piece(split);
  return {std::ssize(split), most, std::move(rungs)};
}

std::vector<int64_t> BatchSizer::State::split_within(const StepInput& input, int64_t tokens,
                                                     const std::vector<int64_t>* given) const {
  const auto& rows = *input.by_length;
  if (given != nullptr && most_tokens_of(rows, *given) <= tokens) {
    return *given;
  }
  return split_by_length(input, rows.packed ? within_packed_tokens(rows.lengths, tokens)
                                            : within_tokens(rows.lengths, tokens));
}

std::vector<int64_t> BatchSizer::State::split_by_length(const StepInput& input,
                                                        const MostRows& most_rows) const {
  if (input.by_length->packed) {
    return largest_pieces(input.by_length->lengths, most_rows);
  }
  const auto cost = splitting_.by_length.times.cost();
  const auto& lengths = input.by_length->lengths;
  return options_.equal_pieces ? split_of_few_shapes(lengths, most_rows, cost)
                               : fastest_split(lengths, most_rows, cost);
}

ExecutionPlan BatchSizer::State::first_plan(const StepInput& input, int64_t pieces,
                                            const std::vector<int64_t>* given) {
  if (!input.by_length || !input.rows) {
    return ExecutionPlan::in_pieces(input.rows.value_or(0), pieces);
  }
  if (given != nullptr) {
    return plan_as_run(input, *given);
  }
  if (policy_of(input).piece_rows() == 0 && options_.piece_rows) {
    policy_of(input).set_piece_rows(*options_.piece_rows * input.by_length->lengths.front());
  }
  auto plan = policy_of(input).first(units_of(input), options_.pieces);
  plan.pieces = std::ssize(split_by(plan, input, nullptr));
  return plan;
}

std::optional<Plan> BatchSizer::State::plan_by_length(const StepInput& input) {
  const auto& rows = *input.by_length;
  const auto& lengths = rows.lengths;
  const auto count = std::ssize(lengths);
  if (count <= Rehearser::kFirstRows || input.kind.uneven ||
      !StepTrace::is_possible(options_.device)) {
    return std::nullopt;
  }
  auto& known = splitting_.by_length;
  bool has_rehearsed = false;
  const auto rehearse_at = [&](int64_t place) {
    has_rehearsed = true;
    return rehearse(count, rows.work_at(place));
  };
  const auto longest = known.fits.learn(forecasts_, rows, rehearse_at);
  if (!longest) {
    if (const auto fits = known.fits.ran_out_rows()) {
      known.policy.measure();
      known.policy.set_piece_rows(*fits * lengths.front());
      const auto more = (*fits + 1) * lengths.front();
      known.policy.note_failure({pieces_for(units_of(input), more), more}, options_.device);
    }
    return std::nullopt;
  }
  if (has_rehearsed && options_.device.is_cuda()) {
    memory::release_cached(options_.device);  // segments that a rehearsal left may be in the way
  }
  const ForecastRoom room(options_.device, margin_);
  const auto fits = known.fits.most_rows(forecasts_, rows, room, margin_);
  Plan plan;
  plan.kept_bytes = engine_.group().kept().bytes();
  plan.used_bytes = room.used_bytes();
  plan.limit_bytes = room.capacity_bytes();
  plan.workspaces_unknown = room.workspaces_unknown();
  plan.split = split_by_length(input, [&](int64_t place) {
    return place == 0 && room.fits(longest->first, count) ? count : fits(place);
  });
  plan.pieces = std::ssize(plan.split);
  int64_t place = 0;
  int64_t most_tokens = 0;
  for (const auto size : plan.split) {
    if (const auto tokens = size * lengths[place]; tokens > most_tokens) {
      most_tokens = tokens;
      const auto at = place == 0 ? longest : known.fits.forecast_at(forecasts_, rows, place);
      const auto& model = plan.pieces == 1 ? longest->first : (at ? at : longest)->second;
      const auto need = room.need(model, size);
      plan.piece_rows = size;
      plan.peak_bytes = plan.used_bytes + need.peak_bytes;
      plan.reserved_bytes = need.reserved_bytes;
      plan.margin_bytes = room.margin_bytes(model, size);
    }
    place += size;
  }
  const auto whole = room.need(longest->first, count);
  plan.whole_bytes = whole.reserved_bytes.value_or(plan.used_bytes + whole.peak_bytes);
  return plan;
}

void PieceClock::begin_attempt() {
  pieces_.clear();
  began_ = Clock::now();
}

void PieceClock::begin_piece(int64_t first, int64_t end) {
  if (by_piece_) {
    pieces_.push_back({first, end - first, Clock::now(), 0});
  }
}

void PieceClock::end_piece() {
  if (by_piece_ && !pieces_.empty()) {
    auto& piece = pieces_.back();
    piece.ms = std::chrono::duration<double, std::milli>(Clock::now() - piece.began).count();
  }
}

void PieceClock::end_attempt(PieceTimes& times, const Lengths& lengths,
                             const std::vector<int64_t>& split) {
  if (!by_piece_) {
    const std::chrono::duration<double, std::milli> all = Clock::now() - began_;
    times.note(lengths, 0, split, all.count());
  }
  for (const auto& piece : pieces_) {
    times.note(lengths, piece.first, {piece.rows}, piece.ms);
  }
}

}  // namespace brimful
