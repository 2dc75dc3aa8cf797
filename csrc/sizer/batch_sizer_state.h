#pragma once
#include <brimful/sizer/batch_sizer.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ladder/ladder.h"
#include "sizer/forecaster.h"
#include "sizer/splitting.h"
#include "step/pieces_run.h"
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
  bool begin_loop(Next next, const StepInput& first);
  void announce_next(Next next, const StepInput& next_input);
  Report report() const;
  void regrouped();
  std::map<std::string, double> state() const;
  void load_state(const std::map<std::string, double>& state);
  StepEngine& engine() { return engine_; }
  const StepEngine& engine() const { return engine_; }
  const Forecaster& forecaster() const { return forecaster_; }

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
  /// The next step begins without an exchange, unless it is to settle something.
  void adopt(const std::vector<ControlRecord>& records);
  void settle_rule(RuleVote& vote, const std::vector<ControlRecord>& said);
  void check_input(const StepInput& input);
  void capture(const StepInput& input, const PieceWork& work);
  void check_limit();
  void require_agreed_pieces(const StepInput& input) const;
  /// `rehearsed`: null where no forecast is made.
  std::optional<Plan> choose_pieces(const StepInput& input, const PieceWork* rehearsed,
                                    Outcome& outcome);
  /// Where they are others now.
  void log_rungs(const Outcome& outcome, const AttemptNote& last, const Climb& climb);
  /// `ref`: what its losses were divided by.
  void stand(const AttemptResult& result, const Divisor& ref, bool of_pairs, Outcome& outcome);
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

  StepEngine engine_;
  BatchSizerOptions options_;
  BatchNorms norms_;
  FoundRule rule_;
  Splitting splitting_;
  bool own_weights_ = false;  ///< the loss function gives weights that are not known beforehand
  Checked checked_;
  Forecaster forecaster_;
  OnLadder ladder_;
  Pairs pairs_;
};

}  // namespace brimful
