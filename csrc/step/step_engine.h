#pragma once
#include <brimful/step/outcome.h>
#include <brimful/step/step.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "step/agreed.h"
#include "step/late_totals.h"
#include "step/one_call.h"
#include "step/piece_sums.h"
#include "step/step_recorder.h"
#include "step/undo.h"

namespace brimful {

/// One step's work, as an engine asks for it, in this order.
class StepTask {
 public:
  virtual ~StepTask() = default;
  /// Its gradients are added to those that there are.
  virtual bool accumulates() const = 0;
  /// The work begins with meet_ranks().
  virtual bool meets() const = 0;
  /// Checks what this rank was given, and captures what a repetition restores (StepEngine::before). What it throws fails
  /// the step on all ranks.
  virtual void prepare() = 0;
  /// What failed before run(), which takes it to the other ranks by itself if this says so.
  virtual bool carries(const std::exception_ptr& /*failed*/) { return false; }
  /// What this rank says of the step where the ranks have not agreed on it yet.
  virtual ControlRecord first_record() const = 0;
  /// What the ranks said then, this one included, whose prepare() may have failed.
  virtual void note_said(const std::vector<ControlRecord>& said) = 0;
  /// The ranks agree, and prepare() did not fail. What it throws fails the step on all ranks.
  virtual void begin() = 0;
  /// Pieces of the next step, if nothing was announced of it.
  virtual uint16_t next_pieces() const = 0;
  /// Makes attempts until one stands, with all that they owe other ranks.
  virtual Outcome run() = 0;
  /// For the report.
  virtual std::optional<int64_t> limit_bytes() const = 0;
};

/// Steps of all ranks together: what they agree on, what is captured and undone, and how a step fails on all of them. What
/// a step does is a StepTask's. One call at a time.
class StepEngine {
 public:
  /// `local`: parameters outside of all participants are this rank's own. `of`: a word for what steps, in messages.
  /// @throws c10::ValueError if gradients would stay on this rank unasked
  StepEngine(StepGroup group, Transaction transaction, bool local, const char* of);
  /// In place of the one before, with the same ranks. Between steps.
  void set_group(StepGroup group);

  // From outside, between steps.
  OneCall::Entered enter(const char* call) { return {calls_under_way_, call}; }
  /// @throws what the task throws, RankFailed for what another rank's throws
  Outcome step(StepTask& task);
  /// With an exchange. `record` is asked for when the group is known. False: no rank has a step to make.
  bool begin_loop(const std::function<ControlRecord()>& record);
  void announce_next(const ControlRecord& next) { agreed_.next = next; }
  /// In the place of a step.
  void announce_failure(FailureKind kind, const std::string& text);
  /// The participants have other groups now.
  void regrouped();

  // For the task.
  StepGroup& group() { return group_; }
  const StepGroup& group() const { return group_; }
  Undo& before() { return before_; }
  StepRecorder& recorder() { return recorder_; }
  const StepRecorder& recorder() const { return recorder_; }
  const Agreed& agreed() const { return agreed_; }
  int64_t steps() const { return steps_; }
  int64_t calls() const { return calls_; }
  /// Of the step under way, in texts: "step 3".
  std::string name() const { return "step " + std::to_string(steps_); }
  /// The others wait for this rank's next attempt, until it begins.
  void owe() { agreed_.owed = true; }
  void attempt_begins() { agreed_.owed = false; }
  /// Takes back all that the attempt has done; another one follows, for which the others wait.
  void undo();
  /// These ended the attempt.
  void note_end(const std::vector<ControlRecord>& records);
  /// An attempt stands by these.
  void adopt(const std::vector<ControlRecord>& records);
  void note_total(double total);
  /// What the step's losses are divided by: alike on all ranks.
  Divisor ref() const { return late_totals_.ref_or(agreed_.ref()); }
  LateTotals& late_totals() { return late_totals_; }
  /// Of the last step. Waits for a device that has it.
  double last_total() const { return late_totals_.last().value_or(agreed_.last_total); }
  /// The next step begins with an exchange.
  void expire() { agreed_.holds = false; }
  void resume(int64_t steps, double last_total);

 private:
  void follow_group();
  void require_all_reduced() const;
  std::exception_ptr agree(StepTask& task, std::exception_ptr failed);
  [[noreturn]] void fail_together(StepTask& task, const std::exception_ptr& failed);
  [[noreturn]] void fail(StepTask& task, const std::exception_ptr& failed);

  StepGroup group_;
  Undo before_;
  bool local_;
  OneCall calls_under_way_;
  int64_t steps_ = 0;
  int64_t calls_ = 0;
  bool meets_ = false;  ///< the last step did, and so does the next
  Agreed agreed_;
  LateTotals late_totals_;
  StepRecorder recorder_;
};

}  // namespace brimful
