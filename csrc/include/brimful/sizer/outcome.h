#pragma once
#include <brimful/sizer/row_kind.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <vector>

namespace brimful {

/// One try of a step.
struct AttemptNote {
  int64_t pieces = 0;
  int64_t piece_rows = 0;    ///< of the largest piece; 0: no data
  int64_t peak_bytes = 0;    ///< of this rank's device during the try
  std::vector<int> ran_out;  ///< ranks that ran out of memory in it, empty for the one that stands
  int64_t buckets_left = 0;  ///< of this rank, when its work ended
  bool alone = false;        ///< repeated, and the other ranks are not informed
  bool cache_released = false;  ///< afterwards: fragments in torch's cache were the trouble
};

struct Outcome {
  double loss = 0;     ///< weighted mean over all samples of all ranks
  double weight = 0;   ///< of all ranks
  int64_t pieces = 0;  ///< on this rank
  std::vector<int64_t>
      split;  ///< rows per piece; a step given the same split repeats it bit by bit
  int64_t retries = 0;
  int64_t peak_bytes = 0;  ///< of this rank's device during the step, retries included
  /// By rank: that of its control record, or NaN; the largest is the straggler's.
  std::vector<double> work_ms;
  bool last = false;  ///< no rank has another batch
  std::vector<AttemptNote> attempts;
};

/// What a rank brings to a step.
struct StepInput {
  std::optional<int64_t> rows;                ///< nothing: this rank has no data
  std::optional<double> weight;               ///< known beforehand; default: rows
  std::optional<std::vector<int64_t>> split;  ///< rows per piece to begin with
  bool accumulate = false;   ///< add to the gradients that there are, on all ranks alike
  RowKind kind;              ///< what forecasts go by; see kind_of()
  std::exception_ptr error;  ///< what is wrong with the batch: fails the step on all ranks
};

struct StepOptions {
  /// Add to the gradients that there are; else they must be empty. Keeps a copy of them during the step.
  bool accumulate = false;
};

}  // namespace brimful
