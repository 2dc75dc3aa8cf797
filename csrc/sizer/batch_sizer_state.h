#pragma once
#include <brimful/sizer/batch_sizer.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ladder/ladder.h"
#include "sizer/agreed.h"
#include "sizer/by_length.h"
#include "sizer/forecasts.h"
#include "sizer/found_pieces.h"
#include "sizer/one_call.h"
#include "sizer/retry.h"
#include "sizer/step_recorder.h"

namespace brimful {
class Climb;
class PairRun;
struct Shortfall;

/// What a BatchSizer is made of.
class BatchSizer::State {
 public:
  State(StepGroup group, Transaction transaction, BatchSizerOptions options);

  Outcome step(const StepInput& input, const PieceWork& work);
  Outcome step_pairs(const StepInput& input, const PairWork& work);
  std::optional<Plan> plan(const StepInput& input, const PieceWork& work);
  bool predicts() const;
  bool begin_loop(Next next, const StepInput& first);
  void announce_next(Next next, const StepInput& next_input);
  void announce_failure(FailureKind kind, const std::string& text);
  Report report() const;
  void regrouped();
  std::map<std::string, double> state() const;
  void load_state(const std::map<std::string, double>& state);
  bool holds() const { return agreed_.holds; }
  bool at_end() const { return agreed_.at_end; }
  int64_t steps() const { return steps_; }
  int64_t calls() const { return calls_; }
  Transaction& transaction() { return transaction_; }
  int world_size() const { return group_.world_size(); }

 private:
  /// What the limit was compared with.
  struct Checked {
    std::optional<int64_t> limit;
    int64_t kept_bytes = 0;  ///< of gradients
  };
  struct OnLadder {
    std::optional<ladder::Ladder> ladder;
    StepRungs logged;  ///< what the log has said last
  };
  struct Splitting {
    int64_t least_rows = 1;  ///< of a piece
    std::set<int64_t> equal_sizes;
    ByLength by_length;
  };
  struct Pairs {
    bool expected = false;  ///< the last step was one over pairs, and so is the next
    bool checked = false;   ///< a step has checked what is given to it
  };
  class Running;
  Outcome step(const StepInput& input, const PieceWork& work, PairRun* pairs);
  ControlRecord record_for(Next next, const StepInput& input) const;
  void follow_group();
  void require_all_reduced() const;
  double own_weight(const StepInput& input) const;
  int64_t wanted_pieces(const StepInput& input) const;
  void adopt(const std::vector<ControlRecord>& records);
  void check_input(const StepInput& input);
  void capture(const StepInput& input, const PieceWork& work);
  void check_limit();
  /// All ranks run the same number of pieces; alone there is no rank to keep step with.
  bool in_lockstep() const { return options_.lockstep && group_.world_size() > 1; }
  std::exception_ptr prepare(const StepInput& input, const PieceWork& work);
  void require_agreed_pieces(const StepInput& input) const;
  [[noreturn]] void fail(const std::exception_ptr& error);
  Outcome run(const StepInput& input, const PieceWork& work, PairRun* pairs);
  /// `rehearsed`: null where no forecast is made.
  std::optional<Plan> choose_pieces(const StepInput& input, const PieceWork* rehearsed,
                                    Outcome& outcome);
  /// `given`: by a forecast, or a step before; what memory does not have is split finer.
  std::vector<int64_t> split_by(const ExecutionPlan& plan, const StepInput& input,
                                const std::vector<int64_t>* given);
  std::optional<Plan> plan_by_length(const StepInput& input);
  std::vector<int64_t> split_by_length(const StepInput& input, const MostRows& most_rows) const;
  /// `given`, if its pieces have so many tokens at most.
  std::vector<int64_t> split_within(const StepInput& input, int64_t tokens,
                                    const std::vector<int64_t>* given) const;
  /// Of rows, or of tokens where a step goes by length.
  RetryPolicy& policy_of(const StepInput& input) {
    return input.by_length ? splitting_.by_length.policy : policy_;
  }
  static int64_t units_of(const StepInput& input);
  static ExecutionPlan plan_as_run(const StepInput& input, const std::vector<int64_t>& split,
                                   ladder::Rungs rungs = {});
  ExecutionPlan first_plan(const StepInput& input, int64_t pieces,
                           const std::vector<int64_t>* given);
  std::vector<int64_t> split_of(int64_t rows, int64_t pieces);
  /// Whether a step with these pieces cannot be split further.
  bool is_finest(const StepInput& input, int64_t pieces) const;
  void log_rungs(const Outcome& outcome, const Climb& climb);  ///< where they are others now
  /// `scale`: of the sums.
  void stand(const AttemptResult& result, double scale, Outcome& outcome);
  Ended settle_attempt(const AttemptResult& result, const StepInput& input, Outcome& outcome,
                       int64_t peak_bytes, const PairRun* pairs);
  [[noreturn]] void throw_failure(const AttemptResult& result, const StepInput& input,
                                  const Outcome& outcome, const PairRun* pairs);
  [[noreturn]] void throw_too_large(const AttemptResult& result, const StepInput& input,
                                    const Outcome& outcome, bool of_pairs);
  Shortfall shortfall_of(const StepInput& input) const;
  void require_room_for_optimizer(const StepInput& input) const;
  void require_weight(const std::vector<ControlRecord>& records) const;
  void require_same_mark(const std::vector<ControlRecord>& records);
  void log_shortage(const Ended& ended, const Outcome& outcome, const StepInput& input,
                    const Retry& retry);
  void note_peak(const StepInput& input, const Outcome& outcome);
  Rehearsal rehearse(int64_t rows, const PieceWork& work);
  /// `anew`: not what the step before found, while there is as much room; a replay of a CUDA allocator takes a while.
  std::optional<Plan> plan_of(const StepInput& input, const PieceWork& work, bool anew);
  void note_shortfall(const AttemptResult& result, const std::optional<Plan>& plan,
                      const RowKind& kind);

  StepGroup group_;
  Transaction transaction_;
  KeptBatch batch_;
  BatchSizerOptions options_;
  BatchNorms norms_;
  OneCall calls_under_way_;
  int64_t steps_ = 0;
  int64_t calls_ = 0;
  Agreed agreed_;
  RetryPolicy policy_;
  Splitting splitting_;
  std::optional<int64_t> released_step_;  ///< the last one with a cache_released
  bool own_weights_ = false;  ///< the loss function gives weights that are not known beforehand
  Checked checked_;
  Forecasts forecasts_;
  FoundPieces found_;  ///< by the last forecast, or before this job was resumed
  double margin_ = 0;  ///< share of the peak that predictions were found to be short of
  StepRecorder recorder_;
  OnLadder ladder_;
  Pairs pairs_;
};

}  // namespace brimful
