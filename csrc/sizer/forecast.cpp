// The pieces of a step from a forecast of its memory: a few rows are run forward and backward for their allocations alone.
#include <brimful/memory/stats.h>
#include <brimful/sizer/batch_sizer.h>
#include <brimful/sizer/pieces.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "sizer/one_call.h"

namespace brimful {
namespace {
constexpr int64_t kFirstTracedRows = 2;  // of the first traced size; BatchNorm refuses one row
constexpr int64_t kCheckedRows = 16;
constexpr double kGoodEnough = 0.01;  // of the peak: else a larger size is traced
constexpr int64_t kStepSlackBytes =
    16384;  // what a step allocates beside its pieces: losses, weights
constexpr double kMoreMargin = 0.02;

int64_t room_of(const memory::Stats& now) {
  return now.limit_bytes ? *now.limit_bytes - now.used_bytes : std::numeric_limits<int64_t>::max();
}

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
}  // namespace

bool BatchSizer::predicts() const {
  return options_.predict && options_.device.is_cpu() && !in_lockstep() &&
         memory::stats(options_.device).limit_bytes;
}

int64_t BatchSizer::with_margin(int64_t bytes) const {
  return static_cast<int64_t>(static_cast<double>(bytes) * (1 + margin_)) + kStepSlackBytes;
}

Rehearsal BatchSizer::rehearse(const StepInput& input, const PieceWork& work) {
  Rehearsal traced;
  std::optional<PeakModel> model;
  const auto trace_few = [&](int64_t rows, KeptBatch& few) {
    const memory::TraceScope scope;
    int64_t of_first = 0;
    group_.rehearse(rows, work, [&] {
      of_first = static_cast<int64_t>(scope.trace().size());
      few.restore();
    });
    const auto& events = scope.trace();
    traced.first.push_back({rows, {events.begin(), events.begin() + of_first}});
    traced.second.push_back({rows, events});
  };
  const auto trace = [&](int64_t rows) {
    KeptBatch few;  // copied before anything is traced
    if (work.tensors) {
      few.begin(work.tensors(0, rows), KeptBatch::Copies::all);
    }
    const auto put_back = [&] {
      few.restore();
      batch_.learn(few);
    };
    try {
      trace_few(rows, few);
    } catch (...) {
      put_back();
      throw;
    }
    put_back();
    if (traced.second.size() >= 2) {
      model = PeakModel::fit(traced.second);
    }
  };
  // The check must not run out of memory itself.
  const auto checked_rows = [&]() -> int64_t {
    const auto room = room_of(memory::stats(options_.device));
    return with_margin(model->peak_bytes(kCheckedRows)) <= room
               ? kCheckedRows
               : model->largest_rows(room - with_margin(0), kCheckedRows) * 4 / 5;
  };
  try {
    trace(kFirstTracedRows);  // what is allocated once and for all
    traced = {};
    trace(kFirstTracedRows);
    trace(kFirstTracedRows + 1);
    int64_t rows = model ? checked_rows() : 0;
    while (model && rows > kFirstTracedRows + 1 && rows <= *input.rows &&
           with_margin(model->peak_bytes(rows)) <= room_of(memory::stats(options_.device))) {
      const auto told = static_cast<double>(model->peak_bytes(rows));
      trace(rows);
      const auto peak = static_cast<double>(memory::peak_bytes(traced.second.back().trace));
      if (std::abs(told - peak) <= kGoodEnough * peak) {
        break;
      }
      rows *= 2;
    }
  } catch (...) {
    if (!is_out_of_memory(std::current_exception())) {
      transaction_.restore();
      throw;
    }  // what was traced before that will do, or the step begins with what has run
    traced.fits = traced.second.empty() ? 1 : traced.second.back().rows;
  }
  transaction_.restore();
  return traced;
}

std::optional<Plan> BatchSizer::plan_of(const StepInput& input, const PieceWork& work) {
  const auto rows = *input.rows;
  if (rows <= kFirstTracedRows || !options_.device.is_cpu() || input.kind.uneven) {
    return std::nullopt;
  }
  Plan plan;
  plan.kept_bytes = group_.kept().bytes();
  const auto take = [&](const memory::Stats& now) {
    plan.used_bytes = now.used_bytes;
    plan.limit_bytes = now.limit_bytes;
    return room_of(now);
  };
  const auto known = forecasts_.find(input.kind);
  const auto kind = fingerprint(input.kind);
  const auto room_before = take(memory::stats(options_.device));
  if (!known && found_.holds(kind, rows, room_before)) {
    plan.pieces = found_.pieces;
    plan.piece_rows = split_of(rows, plan.pieces).front();
    plan.peak_bytes = plan.used_bytes + found_.need_bytes;
    return plan;
  }
  std::optional<int64_t> fits;
  const auto rehearsed = [&] {
    auto rehearsal = rehearse(input, work);
    fits = rehearsal.fits;
    return forecasts_.keep(input.kind, std::move(rehearsal));
  };
  const auto forecast = known ? *known : rehearsed();
  if (!forecast) {
    if (fits) {
      piece_rows_ = *fits;
      history_.note_failure(*fits + 1, pieces_for(rows, *fits + 1), room_before, steps_);
    }
    return std::nullopt;
  }
  const auto peak_of = [&](const std::vector<int64_t>& split) {
    const auto& model = split.size() == 1 ? forecast->first : forecast->second;
    return with_margin(model.peak_bytes(split.front()));
  };
  const auto peak = [&](int64_t pieces) { return peak_of(split_rows(rows, pieces)); };
  const auto room = take(memory::stats(options_.device));
  if (peak(1) > room) {
    const auto bytes =
        static_cast<int64_t>(static_cast<double>(room - kStepSlackBytes) / (1 + margin_));
    const auto most = forecast->second.largest_rows(bytes, rows);
    plan.pieces = std::max<int64_t>(most > 0 ? pieces_for(rows, most) : rows, 2);
    plan.pieces = std::min(plan.pieces, rows);
  }
  const auto split = split_of(rows, plan.pieces);
  const auto need = peak_of(split);
  if (found_.kind != kind || found_.rows <= rows) {  // not an epoch's last, smaller batch
    found_ = {kind, rows, plan.pieces, need, plan.pieces > 1 ? peak(plan.pieces - 1) : 0};
  }
  plan.piece_rows = split.front();
  plan.peak_bytes = plan.used_bytes + need;
  return plan;
}

std::optional<Plan> BatchSizer::plan(const StepInput& input, const PieceWork& work) {
  const OneCall::Entered entered(*calls_under_way_, "plan");
  const KeptGradients::Scope kept(group_.kept());
  if (input.accumulate) {
    group_.keep_gradients();
  }
  check_input(input);
  TORCH_CHECK_VALUE(input.rows, "there is nothing to plan without a batch (rows: none)");
  const KeptBatch::Scope batch(batch_);
  capture(input, work);
  auto plan = plan_of(input, work);
  if (plan) {
    const auto of_optimizer = options_.optimizer_bytes ? options_.optimizer_bytes() : 0;
    plan->peak_bytes = std::max(plan->peak_bytes, plan->used_bytes + of_optimizer);
    plan->pieces = std::ssize(split_of(*input.rows, plan->pieces));
    divide(*plan, options_.standing_bytes ? options_.standing_bytes() : StandingBytes{});
  }
  return plan;
}

void BatchSizer::note_shortfall(const AttemptResult& result, const std::optional<Plan>& plan,
                                const RowKind& kind) {
  if (plan && result.own == AttemptResult::Own::out_of_memory) {
    margin_ += kMoreMargin;
    forecasts_.distrust(kind);
    found_ = {};
  }
}

}  // namespace brimful
