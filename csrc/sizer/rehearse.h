#pragma once
#include <brimful/sizer/batch_sizer.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "sizer/forecast_room.h"
#include "sizer/forecasts.h"

namespace brimful {

/// Runs a few rows of a batch forward and backward for their allocations alone.
class Rehearser {
 public:
  static constexpr int64_t kFirstRows = 2;  ///< of the first traced size; BatchNorm refuses one row

  /// `batch` learns which of its tensors forward changes; `margin` as of a ForecastRoom.
  Rehearser(StepGroup& group, KeptBatch& batch, const PieceWork& work,
            const BatchSizerOptions& options, double margin);

  /// Traces until the memory of a batch with `rows` rows is known, or more rows do not fit.
  void run(int64_t rows);
  /// run() ended because memory ran out: what was traced before that will do, or the step begins with what has run.
  void note_shortage();
  Rehearsal traced() && { return std::move(traced_); }

 private:
  ForecastRoom room() const { return {options_.device, margin_}; }
  /// The check must not run out of memory itself.
  int64_t checked_rows() const;
  bool is_good(double forecast, int64_t rows) const;
  /// False if they do not fit.
  bool trace(int64_t rows);
  void trace_few(int64_t rows, KeptBatch& few);

  StepGroup& group_;
  KeptBatch& batch_;
  const PieceWork& work_;
  const BatchSizerOptions& options_;
  double margin_;
  PieceWork as_in_step_;
  Rehearsal traced_;
  std::optional<PeakModel> model_;
};

}  // namespace brimful
