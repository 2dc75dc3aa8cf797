// Steps whose rows are in order of length: pieces are chosen by tokens, bytes and time in place of rows.
#include "sizer/by_length.h"

#include <brimful/memory/stats.h>
#include <brimful/step/pieces.h>

#include "sizer/forecaster.h"
#include "sizer/rehearse.h"
#include "sizer/step_trace.h"
#include "step/kept_gradients.h"

namespace brimful {
std::optional<Plan> Forecaster::plan_by_length(const StepInput& input) {
  const auto& rows = *input.by_length;
  const auto& lengths = rows.lengths;
  const auto count = std::ssize(lengths);
  if (count <= Rehearser::kFirstRows || input.kind.uneven ||
      !StepTrace::is_possible(options_.device)) {
    return std::nullopt;
  }
  auto& known = splitting_.by_length();
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
      known.policy.note_failure({pieces_for(Splitting::units_of(input), more), more},
                                options_.device);
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
  plan.split = splitting_.split_by_length(input, [&](int64_t place) {
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
