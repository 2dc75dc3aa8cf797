#pragma once
#include <brimful/sizer/row_kind.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace brimful {
struct RowLengths;  // <brimful/sizer/row_lengths.h>
struct RuleVote;    // <brimful/sizer/rule_vote.h>

/// What a step does where one row takes more memory than there is, by the names of its model's modules.
struct StepRungs {
  std::vector<std::string> recomputed;  ///< they save nothing, and run once more in backward
  std::vector<std::string> offloaded;   ///< what they save lies in a file (on CUDA on the host)
  bool everything = false;              ///< whatever the step saves is offloaded

  bool empty() const { return recomputed.empty() && offloaded.empty() && !everything; }
  bool operator==(const StepRungs&) const = default;
};

/// One try of a step.
struct AttemptNote {
  int64_t pieces = 0;
  int64_t piece_rows = 0;    ///< of the largest piece; 0: no data
  int64_t peak_bytes = 0;    ///< of this rank's device during the try
  std::vector<int> ran_out;  ///< ranks that ran out of memory in it, empty for the one that stands
  int64_t buckets_launched = 0;  ///< of this rank, when its work ended
  bool alone = false;            ///< repeated, and the other ranks are not informed
  bool cache_released = false;   ///< afterwards: fragments in torch's cache were the trouble
  int64_t garbage_bytes = 0;     ///< freed afterwards, since garbage in reference cycles held them
  StepRungs rungs;               ///< of this rank
};

struct Outcome {
  double loss = 0;             ///< weighted mean over all samples of all ranks
  std::vector<double> losses;  ///< of a step over pairs: each, on this rank
  double weight = 0;           ///< of all ranks
  int64_t pieces = 0;          ///< on this rank
  std::vector<int64_t>
      split;  ///< rows per piece; a step given the same split repeats it bit by bit
  /// Of a step by length: the row of the batch at each place of the split. Empty: as in the batch.
  std::vector<int64_t> order;
  StepRungs
      rungs;  ///< of the attempt that stands, on this rank; a step given these takes the same memory
  int64_t retries = 0;
  int64_t peak_bytes = 0;  ///< of this rank's device during the step, retries included
  /// By rank: milliseconds of its own work (ControlRecord::work_ms); NaN: not known. The largest is the straggler's.
  std::vector<double> work_ms;
  bool last = false;     ///< no rank has another batch, or all stop
  bool stop = false;     ///< a rank was asked to stop (stop.h), and all do after this step
  bool regroup = false;  ///< a rank wants to join, and all form a new group after this step
  std::vector<AttemptNote> attempts;
};

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
