#pragma once
#include <optional>
#include <string>
#include <vector>

#include "base/thrown_by.h"
#include "pipeline/peaks.h"
#include "pipeline/pipeline_state.h"

namespace brimful::pipeline {

/// A call of step() or forward() under way: microbatches by a schedule, attempt by attempt. Each rank sends its pipeline the
/// worst of what it and its replicas say, and so all ranks of all replicas end an attempt alike.
class Pipeline::State::PipelineStep final : public StepTask {
 public:
  /// `group` is that of the call, and empty for inference.
  PipelineStep(State& pipeline, int64_t rows, const PipelineWork& work, StepGroup& group,
               bool trains);

  bool accumulates() const override { return true; }
  bool meets() const override { return false; }
  uint16_t next_pieces() const override { return 1; }
  std::optional<int64_t> limit_bytes() const override;
  void prepare() override;
  /// Where other ranks must learn of it: they wait for this one's actions.
  bool carries(const std::exception_ptr& failed) override;
  ControlRecord first_record() const override;
  void note_said(const std::vector<ControlRecord>& /*said*/) override {}
  void begin() override;
  Outcome run() override;
  /// Inference, whose outputs it returns.
  Value infer();

 private:
  // pipeline_attempt.cpp
  /// Before the first attempt, and those for which links are missing: what all ranks must know alike.
  void meet();
  /// What is wrong with it, or with anything else before the first action, fails the first action.
  StepResult run_schedule();
  /// Ends an attempt on all ranks of all replicas, and returns how it has ended.
  PeerVerdict close(StepResult& result);
  PeerVerdict own_verdict(const StepResult& result) const;
  void read_replicas(StepResult& result, PeerVerdict& verdict) const;
  /// The attempt's failure is what `work` throws, unless there was one before.
  template <typename Work>
  void noting(StepResult& result, const Work& work) const {
    if (const auto failed = thrown_by(work); failed && !result.failure) {
      result.failure = p_.agreement.failure_outside(failed);
    }
  }

  // pipeline_step.cpp
  /// Fewer microbatches, where this rank has the memory.
  void choose_microbatches();
  void until_it_stands();
  /// By the verdict of all ranks.
  Ended settle(StepResult& result, const RetryPolicy::Bytes& peaks);
  Ended ended_by(const StepResult& result);
  AttemptNote note_of(const StepResult& result, const RetryPolicy::Bytes& peaks) const;
  /// Gradients, buffers and random numbers are as before the attempt.
  void undo();
  Outcome stand();
  std::string name() const;  ///< in texts

  // pipeline_failure.cpp
  c10::Device device_of(const ActionFailure& failure) const;
  [[noreturn]] void raise(StepResult& result);
  /// Undoes the call; other ranks do not learn of it from this one.
  [[noreturn]] void give_up(const StepResult& result);

  State& p_;
  Peaks peaks_;
  Call call_;
  std::vector<ControlRecord> records_;  ///< of the last attempt, by replica
  PeerVerdict verdict_;                 ///< of all ranks on the last attempt
  StepResult standing_;
};

}  // namespace brimful::pipeline
