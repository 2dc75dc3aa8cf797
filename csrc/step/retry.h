#pragma once
#include <brimful/step/outcome.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "step/garbage.h"
#include "step/retry_policy.h"
#include "step/step_recorder.h"

namespace brimful {

/// How an attempt at a unit of work ended, unless it threw.
struct Ended {
  enum class How : uint8_t {
    stands,
    for_others,  ///< repeated as it was; costs none of the retries
    as_it_was,   ///< repeated as it was
    ran_out      ///< repeated with a smaller plan
  };
  How how = How::stands;
  std::optional<c10::Device> device = {};  ///< that ran out; nothing: another rank's
  int64_t pieces = 0;  ///< of the next attempt, if ranks agreed on it; 0: as the policy has it
  std::optional<ExecutionPlan> next =
      {};                      ///< the next attempt's plan, where it is not the policy's
  std::string next_text = {};  ///< why, and what it is

  /// As the ranks agreed.
  Ended in_pieces(int64_t agreed) && {
    pieces = agreed;
    return std::move(*this);
  }
};

/// Runs one unit of work, such as a step, in attempts: a policy says how each is run, and learns how it ended. An attempt
/// that fails undoes itself, and throws where no other may follow it. A shortage has remedies that leave the plan as it
/// is: torch's cache, or garbage that is found, may have the room.
class BRIMFUL_API Retry {
 public:
  /// `policy` and `recorder`, which may be null, outlive it; `first` is the first attempt's plan.
  Retry(RetryPolicy& policy, int64_t rows, int64_t max_retries, ExecutionPlan first,
        StepRecorder* recorder = nullptr);

  /// Calls `attempt()`, which returns an Ended, until one stands.
  template <typename Attempt>
  void run(const Attempt& attempt) {
    do {
      begin_attempt();
    } while (!end_attempt(attempt()));
  }
  /// The same by the caller's own loop: an attempt begins, and returns whether it stands when it has ended.
  void begin_attempt();
  bool end_attempt(const Ended& ended);

  const ExecutionPlan& plan() const { return plan_; }
  /// What was run, where that is not the plan as it was.
  void set_plan(ExecutionPlan plan) { plan_ = std::move(plan); }
  bool may_repeat() const { return failures_ < max_retries_; }
  /// The plan after this one if memory runs out on `device`.
  ExecutionPlan next(c10::Device device) const;
  /// Repetitions so far, of any kind.
  int64_t retries() const { return retries_; }

  /// Whether the plan may do as it was, by the text of a shortage whose handler has ended. Once an attempt.
  bool may_do_as_it_was(const std::string& shortage, c10::Device device);
  /// The same, by what is found now and freed at once.
  bool garbage_helps(c10::Device device) { return garbage_.helps(device); }

  /// Notes an attempt that ended; `ran_out`: on this rank.
  AttemptNote& note(AttemptNote attempt, bool ran_out);
  /// Of the attempts so far.
  const std::vector<AttemptNote>& attempts() const { return attempts_; }
  std::vector<AttemptNote> take_attempts() { return std::move(attempts_); }
  /// Does what may_do_as_it_was() has found, and notes it. After the attempt is undone, whose tensors are gone.
  void remedy();

 private:
  void follow(const Ended& ended);

  RetryPolicy& policy_;
  int64_t rows_;
  int64_t max_retries_;
  ExecutionPlan plan_;
  StepRecorder* recorder_;
  int64_t retries_ = 0;
  int64_t failures_ = 0;  ///< of those, what counts against max_retries
  GarbageRemedy garbage_;
  std::optional<c10::Device> releases_;  ///< its cache is to be given back
  std::vector<AttemptNote> attempts_;
};

}  // namespace brimful
