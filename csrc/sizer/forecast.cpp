// The pieces of a step from a forecast of its memory: a few rows are run forward and backward for their allocations alone.
#include "sizer/forecaster.h"

#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>
#include <brimful/step/pieces.h>

#include <algorithm>
#include <utility>

#include "sizer/forecast_room.h"
#include "sizer/rehearse.h"
#include "sizer/step_trace.h"
#include "step/kept_gradients.h"

namespace brimful {
namespace {
constexpr double kMoreMargin = 0.02;

const PeakModel& model_of(const Forecast& forecast, const std::vector<int64_t>& split) {
  return split.size() == 1 ? forecast.first : forecast.second;
}

/// One row each where nothing fits. On CUDA more rows may fit than fewer: an allocator has segments of few sizes. So pieces
/// are tried one after the other, and behind the sixteenth try an eighth more each time.
int64_t fewest_pieces(const ForecastRoom& room, const Forecast& forecast, int64_t rows) {
  constexpr int kOneByOne = 16;
  const auto fit = [&](int64_t pieces) {
    const auto split = split_rows(rows, pieces);
    return room.fits(model_of(forecast, split), split.front());
  };
  if (fit(1)) {
    return 1;
  }
  const auto most = std::max<int64_t>(forecast.second.largest_rows(room.bytes(), rows), 1);
  auto pieces = std::max<int64_t>(pieces_for(rows, most), 2);  // fewer have no room at all
  for (int tries = 1; pieces < rows && !fit(pieces); ++tries) {
    const auto finer = pieces_for(rows, pieces_for(rows, pieces) - 1);
    pieces = tries < kOneByOne ? finer : std::max(finer, pieces + pieces / 8);
  }
  return std::min(pieces, rows);
}

/// What one piece fewer would need; 0: there are no fewer.
int64_t bytes_of_fewer(const ForecastRoom& room, const Forecast& forecast, int64_t rows,
                       int64_t pieces) {
  if (pieces <= 1) {
    return 0;
  }
  const auto fewer = split_rows(rows, pieces - 1);
  return room.need(model_of(forecast, fewer), fewer.front()).room_bytes;
}

void put_room(Plan& plan, const ForecastRoom& room) {
  plan.used_bytes = room.used_bytes();
  plan.limit_bytes = room.capacity_bytes();
  plan.workspaces_unknown = room.workspaces_unknown();
}

/// What an earlier forecast found for as much room.
void put_found(Plan& plan, const FoundPieces& found, c10::Device device) {
  plan.pieces = found.pieces;
  plan.peak_bytes = plan.used_bytes + found.need_bytes;
  if (device.is_cuda()) {
    plan.reserved_bytes = plan.peak_bytes;
  }
}

/// Of its largest piece, and of the whole batch as one.
void put_need(Plan& plan, const ForecastRoom::Need& need, const ForecastRoom::Need& whole) {
  plan.peak_bytes = plan.used_bytes + need.peak_bytes;
  plan.reserved_bytes = need.reserved_bytes;
  plan.whole_bytes = whole.reserved_bytes.value_or(plan.used_bytes + whole.peak_bytes);
}
}  // namespace

bool Forecaster::predicts() const {
  return options_.predict && !splitting_.in_lockstep() && ForecastRoom::is_known(options_.device);
}

Rehearsal Forecaster::rehearse(int64_t rows, const PieceWork& work) {
  Rehearser rehearser(engine_.group(), engine_.before().batch(), work, options_, margin_);
  try {
    rehearser.run(rows);
  } catch (...) {
    if (!is_out_of_memory(std::current_exception())) {
      engine_.before().transaction().restore();
      throw;
    }
    rehearser.note_shortage();
  }
  engine_.before().transaction().restore();
  return std::move(rehearser).traced();
}

std::optional<Plan> Forecaster::plan_of(const StepInput& input, const PieceWork& work, bool anew) {
  if (input.by_length) {
    return plan_by_length(input);
  }
  const auto rows = *input.rows;
  if (rows <= Rehearser::kFirstRows || input.kind.uneven ||
      !StepTrace::is_possible(options_.device)) {
    return std::nullopt;
  }
  Plan plan;
  plan.kept_bytes = engine_.group().kept().bytes();
  const auto known = forecasts_.find(input.kind);
  const auto kind = fingerprint(input.kind);
  const ForecastRoom before(options_.device, margin_);
  put_room(plan, before);
  if ((!known || !anew) && found_.holds(kind, rows, before.bytes())) {
    put_found(plan, found_, options_.device);
    plan.piece_rows = splitting_.split_of(rows, plan.pieces).front();
    return plan;
  }
  std::optional<int64_t> fits;
  const auto rehearsed = [&] {
    auto rehearsal = rehearse(rows, work);
    fits = rehearsal.fits;
    return forecasts_.keep(input.kind, std::move(rehearsal));
  };
  const auto forecast = known ? *known : rehearsed();
  if (!forecast) {
    if (fits) {
      splitting_.by_rows().measure();
      splitting_.by_rows().set_piece_rows(*fits);
      splitting_.by_rows().note_failure({pieces_for(rows, *fits + 1), *fits + 1}, options_.device);
    }
    return std::nullopt;
  }
  auto room = known ? before : ForecastRoom(options_.device, margin_);
  plan.pieces = fewest_pieces(room, *forecast, rows);
  if (plan.pieces > 1 && !known && options_.device.is_cuda()) {
    memory::release_cached(options_.device);  // segments that the rehearsal left may be in the way
    room = ForecastRoom(options_.device, margin_);
    plan.pieces = fewest_pieces(room, *forecast, rows);
  }
  put_room(plan, room);
  const auto split = splitting_.split_of(rows, plan.pieces);
  const auto& model = model_of(*forecast, split);
  const auto need = room.need(model, split.front());
  plan.piece_rows = split.front();
  if (found_.kind != kind || found_.rows <= rows) {  // not an epoch's last, smaller batch
    found_ = {kind, rows, plan.pieces, need.room_bytes,
              bytes_of_fewer(room, *forecast, rows, plan.pieces)};
  }
  plan.margin_bytes = room.margin_bytes(model, split.front());
  const auto whole = plan.pieces == 1 ? need : room.need(forecast->first, rows);
  put_need(plan, need, whole);
  return plan;
}

void Forecaster::note_shortfall(const RowKind& kind) {
  margin_ += kMoreMargin;
  forecasts_.distrust(kind);
  found_ = {};
}

}  // namespace brimful
