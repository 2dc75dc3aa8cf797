// The pieces of a step from a forecast of its memory: a few rows are run forward and backward for their allocations alone.
#include <brimful/memory/stats.h>
#include <brimful/sizer/batch_sizer.h>
#include <brimful/sizer/pieces.h>
#include <brimful/step/oom.h>

#include <algorithm>
#include <cmath>

#include "sizer/one_call.h"

namespace brimful {
namespace {
constexpr int64_t kLeastRows = 2;  // of the first traced size; BatchNorm refuses one row
constexpr int64_t kCheckedRows = 16;
constexpr double kGoodEnough = 0.01;    // of the peak: else a larger size is traced
constexpr int64_t kSlackBytes = 16384;  // what a step allocates beside its pieces: losses, weights
constexpr double kMoreMargin = 0.02;
}  // namespace

std::optional<BatchSizer::Forecast> BatchSizer::rehearse(const StepInput& input,
                                                         const PieceWork& work) {
  std::vector<TracedRows> first;
  std::vector<TracedRows> both;
  std::optional<PeakModel> model;
  const auto trace = [&](int64_t rows) {
    const memory::TraceScope scope;
    int64_t of_first = 0;
    group_.rehearse(rows, work, [&] { of_first = static_cast<int64_t>(scope.trace().size()); });
    const auto& events = scope.trace();
    first.push_back({rows, {events.begin(), events.begin() + of_first}});
    both.push_back({rows, events});
  };
  try {
    group_.rehearse(kLeastRows, work, [] {});  // what is allocated once and for all
    trace(kLeastRows);
    trace(kLeastRows + 1);
    model = PeakModel::fit(both);
    for (int64_t rows = kCheckedRows; model && rows <= *input.rows; rows *= 2) {
      trace(rows);
      const auto peak = static_cast<double>(memory::peak_bytes(both.back().trace));
      const double off = std::abs(static_cast<double>(model->peak_bytes(rows)) - peak) / peak;
      model = PeakModel::fit(both);
      if (off <= kGoodEnough) {
        break;
      }
    }
  } catch (...) {
    if (!is_out_of_memory(std::current_exception())) {
      transaction_.restore();
      throw;
    }  // what was traced before that will do, or the step finds out
  }
  transaction_.restore();
  if (!model) {
    return std::nullopt;
  }
  auto one = PeakModel::fit(std::move(first));
  return one ? std::optional(Forecast{std::move(*one), std::move(*model)}) : std::nullopt;
}

const std::optional<BatchSizer::Forecast>& BatchSizer::forecast(const StepInput& input,
                                                                const PieceWork& work) {
  const auto known = forecasts_.find(input.kind);
  if (known != forecasts_.end()) {
    return known->second;
  }
  return forecasts_.emplace(input.kind, rehearse(input, work)).first->second;
}

std::optional<Plan> BatchSizer::plan_of(const StepInput& input, const PieceWork& work) {
  const auto rows = *input.rows;
  if (rows <= kLeastRows) {
    return std::nullopt;
  }
  const auto& known = forecast(input, work);
  if (!known) {
    return std::nullopt;
  }
  const auto now = memory::stats(options_.device);
  Plan plan;
  plan.used_bytes = now.used_bytes;
  plan.kept_bytes = group_.kept().bytes();
  plan.limit_bytes = now.limit_bytes;
  const auto with_margin = [&](int64_t bytes) {
    return static_cast<int64_t>(static_cast<double>(bytes) * (1 + margin_)) + kSlackBytes;
  };
  const auto peak = [&](int64_t pieces) {
    const auto of_piece = split_rows(rows, pieces).front();
    return with_margin(pieces == 1 ? known->first.peak_bytes(of_piece)
                                   : known->second.peak_bytes(of_piece));
  };
  const auto room = now.limit_bytes ? *now.limit_bytes - now.used_bytes : peak(1);
  if (peak(1) > room) {
    const auto bytes =
        static_cast<int64_t>(static_cast<double>(room - kSlackBytes) / (1 + margin_));
    const auto most = known->second.largest_rows(bytes, rows);
    plan.pieces = std::max<int64_t>(most > 0 ? pieces_for(rows, most) : rows, 2);
    plan.pieces = std::min(plan.pieces, rows);
  }
  plan.piece_rows = split_rows(rows, plan.pieces).front();
  plan.peak_bytes = now.used_bytes + peak(plan.pieces);
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
  transaction_.capture();
  return plan_of(input, work);
}

void BatchSizer::note_shortfall(const AttemptResult& result, const std::optional<Plan>& plan) {
  if (plan && result.own == AttemptResult::Own::out_of_memory) {
    margin_ += kMoreMargin;
  }
}

}  // namespace brimful
