#pragma once
#include <brimful/sizer/batch_sizer_options.h>
#include <brimful/sizer/plan.h>
#include <brimful/sizer/step_input.h>

#include <optional>

#include "sizer/forecasts.h"
#include "sizer/found_pieces.h"
#include "sizer/splitting.h"
#include "step/step_engine.h"

namespace brimful {

/// What a step takes, and the pieces that fit, before it runs: by a rehearsal of a few rows of each kind of batch.
class Forecaster {
 public:
  /// All outlive it.
  Forecaster(StepEngine& engine, const BatchSizerOptions& options, Splitting& splitting)
      : engine_(engine), options_(options), splitting_(splitting) {}

  /// True if the pieces of a step are chosen by a forecast now.
  bool predicts() const;
  /// Nothing where the memory follows no law that it knows. `anew`: not what the step before found, while there is as much
  /// room; a replay of a CUDA allocator takes a while.
  std::optional<Plan> plan_of(const StepInput& input, const PieceWork& work, bool anew);
  /// What was planned for batches of this kind ran out of memory.
  void note_shortfall(const RowKind& kind);

  /// By the last forecast, or before this job was resumed.
  const FoundPieces& found() const { return found_; }
  void set_found(const FoundPieces& found) { found_ = found; }

 private:
  Rehearsal rehearse(int64_t rows, const PieceWork& work);
  std::optional<Plan> plan_by_length(const StepInput& input);

  StepEngine& engine_;
  const BatchSizerOptions& options_;
  Splitting& splitting_;
  Forecasts forecasts_;
  FoundPieces found_;
  double margin_ = 0;  ///< share of the peak that predictions were found to be short of
};

}  // namespace brimful
