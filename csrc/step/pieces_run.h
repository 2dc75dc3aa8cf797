#pragma once
#include <brimful/step/step.h>

#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "step/attempt_task.h"
#include "step/piece_sums.h"
#include "step/prologue.h"

namespace brimful {

/// How an attempt ended on this rank; how the step ends, all ranks' records show.
struct AttemptResult {
  Status own = Status::ok;  ///< ok, retry (of a late gradient), out_of_memory or error
  std::exception_ptr
      error;  ///< set for `error` only: an out-of-memory error pins the tensors of its frames
  std::string text;              ///< of the error, out of memory or not
  int64_t buckets_launched = 0;  ///< when the work ended
  bool retry_alone = false;      ///< no bucket was launched: no other rank needs to know
  bool same_split = false;       ///< AttemptTask::may_do_as_it_was said so
  std::vector<ControlRecord>
      records;          ///< by rank; empty with retry_alone, and after leaving lockstep
  at::Tensor doubtful;  ///< PieceSums::doubtful() of its pieces
};

struct PiecesAttempt {
  std::vector<int64_t> split;  ///< rows per piece; empty: this rank has no data
  Divisor ref;                 ///< total weight of losses
  ControlRecord
      record;  ///< what is announced (verdict: ok or no_data); weight and loss are filled in
  int buffer_source = 0;
  bool lockstep = false;     ///< pieces of weight 0 run too; no retry alone
  bool retries_left = true;  ///< false: what would be repeated fails the step instead
  bool can_shrink = true;    ///< false: running out of memory now fails the step
  /// What runs before the pieces. Optional; outlives the attempt.
  Prologue* prologue = nullptr;
};

/// An attempt of a group whose work is pieces, one after the other.
class PiecesRun {
 public:
  /// All of them outlive it.
  PiecesRun(StepGroup& group, const PiecesAttempt& attempt, AttemptTask& task)
      : group_(group), attempt_(attempt), task_(task), said_{attempt.record, {}} {}

  /// Runs the pieces and takes part in all collectives whatever happens, then waits for them. Once.
  /// @throws RankFailed if the process group broke
  AttemptResult run();

 private:
  void run_piece(const PieceLoss& given, bool may_be_late, bool first, bool last);
  /// All ranks may know what its pieces sum to.
  void complete();
  void end_after_error();
  void note_error();
  /// Memory ran out behind the last gradient: nothing of the step is missing, so it stands, unless this fails.
  bool complete_behind();
  void end_failed(Status verdict);
  void leave_lockstep();
  /// Of another rank that failed before this one left.
  std::optional<Failure> cause_elsewhere() const;
  [[noreturn]] void throw_cause() const;
  /// What is left of a model's collectives could not be issued.
  [[noreturn]] void throw_broken() const;

  StepGroup& group_;
  const PiecesAttempt& attempt_;
  AttemptTask& task_;
  Announcement said_;
  PieceSums sums_;
  AttemptResult result_;
  bool of_a_group_ = false;       ///< the error is of a collective that another rank has left
  std::optional<Failure> cause_;  ///< elsewhere, of such an error
};

/// Runs rows [0, rows) twice, forward and backward, for what that does to memory: nothing leaves this rank, no gradient
/// stays. `between` is called after the first time. Before an attempt, never instead of it.
void rehearse(StepGroup& group, int64_t rows, const PieceWork& work,
              const std::function<void()>& between);

}  // namespace brimful
