#pragma once
#include <brimful/sizer/batch_sizer_options.h>
#include <brimful/sizer/plan.h>
#include <brimful/sizer/step_input.h>
#include <brimful/step/step.h>

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "sizer/by_length.h"

namespace brimful {

/// How a sizer's batches are cut: by rows, or by tokens where a step goes by length. It remembers what was seen to fit.
class Splitting {
 public:
  /// Both outlive it.
  Splitting(const BatchSizerOptions& options, const StepGroup& group);

  /// All ranks run the same number of pieces; alone there is no rank to keep step with.
  bool in_lockstep() const { return options_.lockstep && group_.world_size() > 1; }
  /// Of rows, or of tokens where a step goes by length.
  RetryPolicy& policy_of(const StepInput& input) {
    return input.by_length ? by_length_.policy : by_rows_;
  }
  RetryPolicy& by_rows() { return by_rows_; }
  const RetryPolicy& by_rows() const { return by_rows_; }
  ByLength& by_length() { return by_length_; }
  const ByLength& by_length() const { return by_length_; }

  int64_t wanted_pieces(const StepInput& input) const;
  /// By the caller, or a forecast; null: by neither.
  static const std::vector<int64_t>* given(const StepInput& input, const std::optional<Plan>& plan);
  static int64_t units_of(const StepInput& input);
  static ExecutionPlan plan_as_run(const StepInput& input, const std::vector<int64_t>& split,
                                   Rungs rungs = {});
  ExecutionPlan first_plan(const StepInput& input, int64_t pieces,
                           const std::vector<int64_t>* given);
  /// `given`: by a forecast, or a step before; what memory does not have is split finer.
  std::vector<int64_t> split_by(const ExecutionPlan& plan, const StepInput& input,
                                const std::vector<int64_t>* given);
  std::vector<int64_t> split_of(int64_t rows, int64_t pieces);
  std::vector<int64_t> split_by_length(const StepInput& input, const MostRows& most_rows) const;
  /// Whether a step with these pieces cannot be split further.
  bool is_finest(const StepInput& input, int64_t pieces) const;
  /// Of a piece.
  int64_t least_rows() const { return least_rows_; }
  void set_least_rows(int64_t rows) { least_rows_ = rows; }

 private:
  /// `given`, if its pieces have so many tokens at most.
  std::vector<int64_t> split_within(const StepInput& input, int64_t tokens,
                                    const std::vector<int64_t>* given) const;
  int64_t most_pieces(int64_t rows) const;

  const BatchSizerOptions& options_;
  const StepGroup& group_;
  RetryPolicy by_rows_;
  ByLength by_length_;
  int64_t least_rows_ = 1;
  std::set<int64_t> equal_sizes_;
};

}  // namespace brimful
