#pragma once
#include <brimful/export.h>
#include <brimful/sizer/step_input.h>
#include <brimful/step/step.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "ladder/ladder.h"
#include "step/retry.h"

namespace brimful {

/// One step's way up the ladder: attempt after attempt, where pieces cannot be split further.
class Climb {
 public:
  using AskRoom = std::function<ladder::Ladder::Room()>;
  /// `ladder` may be empty: there is no way up then. All of them outlive it.
  Climb(std::optional<ladder::Ladder>& ladder, const StepInput& input, const PieceWork& work,
        AskRoom room);

  /// Of the first attempt. `finest`: its pieces cannot be split further.
  Rungs first(bool finest);

  /// `may_repeat`: the step has retries.
  void begin_attempt(const Rungs& rungs, bool finest, bool may_repeat);
  /// Another way to run the same pieces may be left.
  bool may_go_on() const;
  /// A piece's forward runs on the rungs while it lives.
  class Forward {
   public:
    explicit Forward(ladder::Ladder::Attempt* attempt);
    ~Forward();
    Forward(const Forward&) = delete;
    Forward& operator=(const Forward&) = delete;

   private:
    ladder::Ladder::Attempt* attempt_;
  };
  /// @throws c10::Error where nothing can be put aside
  Forward forward();
  /// What the rungs need may turn out not to be there: another attempt without follows then.
  bool may_start_over() const;
  /// A module could not be recomputed, or nothing put aside: the attempt is to be run again without.
  bool is_rejected() const;
  void end_attempt(bool ok);
  /// How an attempt that does not stand ended, with the plan of the next one where it is this way's to say.
  Ended follow(Ended ended, const ExecutionPlan& failed);

  /// Of the last attempt.
  StepRungs named() const;
  /// What its rungs were said to take.
  std::optional<ladder::PlanCost> cost() const;
  double forward_ms() const { return ladder_ ? ladder_->forward_ms(kind()) : 0; }

 private:
  const ladder::Ladder::Kind& kind() const;
  StepRungs named(const Rungs& rungs) const;

  std::optional<ladder::Ladder>& ladder_;
  const StepInput& input_;
  const PieceWork& work_;
  AskRoom room_;
  mutable std::optional<ladder::Ladder::Kind> kind_;
  Rungs rungs_;
  bool finest_ = false;
  bool may_repeat_ = false;
  bool ended_ = false;  ///< no way is left
  int64_t climbed_ = 0;
  std::string rejected_;
  std::unique_ptr<ladder::Ladder::Attempt> attempt_;
};

}  // namespace brimful
