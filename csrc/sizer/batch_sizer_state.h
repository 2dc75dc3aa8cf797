#pragma once
#include <brimful/sizer/batch_sizer.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ladder/ladder.h"
#include "sizer/by_length.h"
#include "sizer/forecasts.h"
#include "sizer/found_pieces.h"
#include "step/retry.h"
#include "step/step_engine.h"

namespace brimful {
class Climb;
class PairRun;
struct Shortfall;

/// What a BatchSizer is made of.
class BatchSizer::State {
 public:
  State(StepGroup group, Transaction transaction, BatchSizerOptions options);

  std::optional<Plan> plan(const StepInput& input, const PieceWork& work);
  bool predicts() const;
  bool begin_loop(Next next, const StepInput& first);
  void announce_next(Next next, const StepInput& next_input);
  Report report() const;
  void regrouped();
  std::map<std::string, double> state() const;
  void load_state(const std::map<std::string, double>& state);
  StepEngine& engine() { return engine_; }
  const StepEngine& engine() const { return engine_; }

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
    bool checked = false;  ///< a step has checked what is given to it
  };
  /// How the loss is composed, of a sizer that finds it out.
  struct FoundRule {
    bool pending = false;  ///< the next step begins with an exchange, in which the ranks settle it
    std::string name;
    int64_t runs = 0;  ///< forwards and backwards that finding it out took
    double ms = 0;
  };
  friend class BatchSizer;
  class SizerStep;
  ControlRecord record_for(Next next, const StepInput& input) const;
  double own_weight(const StepInput& input) const;
  int64_t wanted_pieces(const StepInput& input) const;
  /// The next step begins without an exchange, unless it is to settle something.
  void adopt(const std::vector<ControlRecord>& records);
  void settle_rule(RuleVote& vote, const std::vector<ControlRecord>& said);
  void check_input(const StepInput& input);
  void capture(const StepInput& input, const PieceWork& work);
  void check_limit();
  /// All ranks run the same number of pieces; alone there is no rank to keep step with.
  bool in_lockstep() const { return options_.lockstep && engine_.group().world_size() > 1; }
  void require_agreed_pieces(const StepInput& input) const;
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
  /// By the caller, or a forecast; null: by neither.
  static const std::vector<int64_t>* given_split(const StepInput& input,
                                                 const std::optional<Plan>& plan);
  static int64_t units_of(const StepInput& input);
  static ExecutionPlan plan_as_run(const StepInput& input, const std::vector<int64_t>& split,
                                   Rungs rungs = {});
  ExecutionPlan first_plan(const StepInput& input, int64_t pieces,
                           const std::vector<int64_t>* given);
  std::vector<int64_t> split_of(int64_t rows, int64_t pieces);
  /// Whether a step with these pieces cannot be split further.
  bool is_finest(const StepInput& input, int64_t pieces) const;
  /// Where they are others now.
  void log_rungs(const Outcome& outcome, const AttemptNote& last, const Climb& climb);
  /// `scale`: of the sums.
  void stand(const AttemptResult& result, double scale, Outcome& outcome);
  /// `note`: of that attempt.
  Ended settle_attempt(const AttemptResult& result, const StepInput& input, AttemptNote& note,
                       const Retry& retry, const PairRun* pairs);
  [[noreturn]] void throw_failure(const AttemptResult& result, const StepInput& input,
                                  const Retry& retry, const PairRun* pairs);
  [[noreturn]] void throw_too_large(const AttemptResult& result, const StepInput& input,
                                    const Retry& retry, bool of_pairs);
  Shortfall shortfall_of(const StepInput& input) const;
  void require_room_for_optimizer(const StepInput& input) const;
  /// Every rank has the same records: all raise, and go on with an exchange.
  void require_alike(const std::vector<ControlRecord>& records);
  void log_shortage(const Ended& ended, const Outcome& outcome, const StepInput& input,
                    const Retry& retry);
  void note_peak(const StepInput& input, const Outcome& outcome);
  Rehearsal rehearse(int64_t rows, const PieceWork& work);
  /// `anew`: not what the step before found, while there is as much room; a replay of a CUDA allocator takes a while.
  std::optional<Plan> plan_of(const StepInput& input, const PieceWork& work, bool anew);
  void note_shortfall(const AttemptResult& result, const std::optional<Plan>& plan,
                      const RowKind& kind);

  StepEngine engine_;
  BatchSizerOptions options_;
  BatchNorms norms_;
  FoundRule rule_;
  RetryPolicy policy_;
  Splitting splitting_;
  bool own_weights_ = false;  ///< the loss function gives weights that are not known beforehand
  Checked checked_;
  Forecasts forecasts_;
  FoundPieces found_;  ///< by the last forecast, or before this job was resumed
  double margin_ = 0;  ///< share of the peak that predictions were found to be short of
  OnLadder ladder_;
  Pairs pairs_;
};

}  // namespace brimful
