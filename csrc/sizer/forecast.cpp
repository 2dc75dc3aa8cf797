// The pieces of a step from a forecast of its memory: a few rows are run forward and backward for their allocations alone.
#include <brimful/memory/stats.h>
#include <brimful/step/oom.h>
#include <brimful/step/pieces.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

#include "sizer/batch_sizer_state.h"
#include "sizer/forecast_room.h"
#include "sizer/rehearse.h"
#include "sizer/step_trace.h"
#include "step/kept_gradients.h"
#include "step/one_call.h"

namespace brimful {
namespace {
constexpr double kMoreMargin = 0.02;

/// Divides the peak among what is known to be held, and the rest.
void divide(Plan& plan, const StandingBytes& standing) {
  int64_t rest = plan.peak_bytes;
  const auto take = [&](int64_t bytes) {
    const auto taken = std::min(bytes, rest);
    rest -= taken;
    return taken;
  };
  plan.parameter_bytes = take(standing.parameters);
  plan.optimizer_bytes = take(standing.optimizer_state.value_or(0));
  plan.buffer_bytes = take(standing.buffers);
  plan.gradient_bytes = take(standing.trainable);
  plan.activation_bytes = rest;
}

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

bool BatchSizer::State::predicts() const {
  return options_.predict && !in_lockstep() && ForecastRoom::is_known(options_.device);
}

Rehearsal BatchSizer::State::rehearse(int64_t rows, const PieceWork& work) {
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

std::optional<Plan> BatchSizer::State::plan_of(const StepInput& input, const PieceWork& work,
                                               bool anew) {
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
    plan.piece_rows = split_of(rows, plan.pieces).front();
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
      policy_.measure();
      policy_.set_piece_rows(*fits);
      policy_.note_failure({pieces_for(rows, *fits + 1), *fits + 1}, options_.device);
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
  const auto split = split_of(rows, plan.pieces);
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

std::optional<Plan> BatchSizer::State::plan(const StepInput& input, const PieceWork& work) {
  const auto entered = engine_.enter("plan");
  const auto gradients_back = c10::make_scope_exit([&] { engine_.group().kept().give_back(); });
  if (input.accumulate) {
    engine_.group().keep_gradients();
  }
  check_input(input);
  TORCH_CHECK_VALUE(input.rows, "there is nothing to plan without a batch (rows: none)");
  const auto lets_go = c10::make_scope_exit([&] { engine_.before().release(); });
  capture(input, work);
  auto plan = plan_of(input, work, true);
  if (plan) {
    const auto of_optimizer = options_.optimizer_bytes ? options_.optimizer_bytes() : 0;
    plan->peak_bytes = std::max(plan->peak_bytes, plan->used_bytes + of_optimizer);
    if (plan->reserved_bytes) {
      plan->reserved_bytes = std::max(*plan->reserved_bytes, plan->peak_bytes);
    }
    if (plan->whole_bytes) {
      plan->whole_bytes = std::max(*plan->whole_bytes, plan->peak_bytes);
    }
    if (plan->split.empty()) {
      plan->pieces = std::ssize(split_of(*input.rows, plan->pieces));
    }
    divide(*plan, options_.standing_bytes ? options_.standing_bytes() : StandingBytes{});
  }
  return plan;
}

void BatchSizer::State::note_shortfall(const AttemptResult& result, const std::optional<Plan>& plan,
                                       const RowKind& kind) {
  if (plan && result.own == Status::out_of_memory) {
    margin_ += kMoreMargin;
    forecasts_.distrust(kind);
    found_ = {};
  }
}

}  // namespace brimful
