#pragma once
#include <brimful/sizer/row_kind.h>
#include <brimful/step/outcome.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace brimful {
struct RowLengths;  // <brimful/sizer/row_lengths.h>
struct RuleVote;    // <brimful/sizer/rule_vote.h>

/// What a rank brings to a step.
struct StepInput {
  std::optional<int64_t> rows;                ///< nothing: this rank has no data
  std::optional<double> weight;               ///< known beforehand; default: rows
  std::optional<std::vector<int64_t>> split;  ///< rows per piece to begin with
  std::optional<StepRungs> rungs;             ///< to begin with
  bool accumulate = false;  ///< add to the gradients that there are, on all ranks alike
  RowKind kind;             ///< what forecasts go by; see kind_of()
  /// The same, asked for only where one row does not fit. Optional: batches are then taken for alike.
  std::function<RowKind()> ask_kind;
  /// Rows of unequal length: pieces are trimmed, and chosen by the lengths. Not in lockstep.
  std::shared_ptr<const RowLengths> by_length;
  /// How the loss of this batch is composed, of a sizer that finds it out; the ranks settle it before any piece runs.
  std::shared_ptr<RuleVote> vote;
  bool whole = false;        ///< the batch is not to be split
  std::exception_ptr error;  ///< what is wrong with the batch: fails the step on all ranks
};

struct StepOptions {
  /// Add to the gradients that there are; else they must be empty. Keeps a copy of them during the step.
  bool accumulate = false;
};

}  // namespace brimful
