#pragma once
#include <brimful/error.h>
#include "sizer/retry_policy.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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
};

/// Runs one unit of work, such as a step, in attempts: a policy says how each is run, and learns how it ended. An attempt
/// that fails undoes itself, and throws where no other may follow it.
class BRIMFUL_API Retry {
 public:
  /// `policy` outlives it; `first` is the first attempt's plan.
  Retry(RetryPolicy& policy, int64_t rows, int64_t max_retries, ExecutionPlan first);

  /// Calls `attempt()`, which returns an Ended, until one stands.
  template <typename Attempt>
  void run(const Attempt& attempt) {
    for (Ended ended = attempt(); ended.how != Ended::How::stands; ended = attempt()) {
      follow(ended);
    }
    policy_.end_unit();
  }

  const ExecutionPlan& plan() const { return plan_; }
  /// What was run, where that is not the plan as it was.
  void set_plan(ExecutionPlan plan) { plan_ = std::move(plan); }
  bool may_repeat() const { return failures_ < max_retries_; }
  /// May be repeated with a smaller plan.
  bool may_shrink() const { return may_repeat() && plan_.piece_rows > 1; }
  /// The plan after this one if memory runs out on `device`.
  ExecutionPlan next(c10::Device device) const;
  /// Repetitions so far, of any kind.
  int64_t retries() const { return retries_; }
  void note_tried(int64_t peak_bytes);
  const std::vector<TriedSplit>& tried() const { return tried_; }

 private:
  void follow(const Ended& ended);

  RetryPolicy& policy_;
  int64_t rows_;
  int64_t max_retries_;
  ExecutionPlan plan_;
  int64_t retries_ = 0;
  int64_t failures_ = 0;  ///< of those, what counts against max_retries
  std::vector<TriedSplit> tried_;
};

}  // namespace brimful
