#pragma once
#include <brimful/step/participant.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "reducer/engine_parts.h"

namespace brimful {

class Engine;

/// A reducer's part of steps, one after the other: launches full buckets in order (launch.cpp), and ends the step with one
/// wait (finish.cpp). A StepGroup drives it, or a plain loop.
class EngineStep final : public ParticipantAttempt {
 public:
  /// `engine` consists of `parts`; both outlive this.
  EngineStep(Engine& engine, EngineParts& parts);
  /// For the hooks of losses.
  void attach(std::weak_ptr<Arrivals> arrivals) { watched_ = std::move(arrivals); }

  // ParticipantAttempt's that a plain loop calls too.
  Progress progress() const override;
  void launch_early(Fill fill) override;
  Ending finish() override;
  void accept(double scale, bool keep_unused) override;
  void discard() override;

  // For a plain loop.
  /// A backward of it, or what stands in for one, under the attempt's lock. `step`: of the reducers that it reaches; null: it
  /// ends none.
  void begin_plain(const Scales& scales, int buffer_source, std::shared_ptr<SharedStep> step,
                   bool launches);
  /// No backward runs any more; what was launched is still waited for.
  void leave_backward();
  /// Before a step. @throws RankFailed if sums of earlier ones have failed
  void require_sums() { transport_->require_sums(); }
  /// Waits for them.
  void wait_for_sums() { transport_->wait_for_sums(); }
  /// Of one that ends no step.
  void end_unsent_backward();
  /// In place of accept(), on a rank that only made the others' collectives.
  void accept_nothing();
  /// Ends an attempt that leaves nothing behind, and is none.
  /// @throws RankFailed if the process group broke
  void give_up();

  /// Launches the early buckets whose turn it is, under the attempt's lock.
  void advance_early();

 private:
  // ParticipantAttempt's that only a step calls.
  void begin(int buffer_source) override;
  void set_order(ParticipantAttempt* before, ParticipantAttempt* after) override;
  void begin_piece(bool last, const at::Tensor& loss) override;
  void advance() override;
  bool launched_early() const override { return launcher_.launched_early(); }
  bool takes_late_weight() const override { return transport_->takes_late_weight(); }
  void launch_last(Fill fill, const Announcement& said) override;
  void abandon() override;

  void start_backward(bool launching);
  void launch();
  void launch_until(int64_t end, Fill fill, const Announcement* said);
  void write_tail();
  void write_back_buffers();
  void end_attempt();
  void end_unmade();
  bool looks_at_updates() const { return updates_ && !attempt_.is_uneven(); }

  Engine& engine_;
  GroupLink& link_;
  BucketSet& layout_;
  HookChain& hooks_;
  PlanTuner& tuner_;
  Stopwatch& watch_;
  Attempt& attempt_;
  Placement& placement_;
  Launcher& launcher_;
  std::unique_ptr<RecordTransport>& transport_;
  StepGate& gate_;
  Arrivals& arrivals_;
  std::optional<Updates>& updates_;
  EngineDriver*& driver_;
  std::weak_ptr<Arrivals> watched_;
  Announcement outgoing_;  ///< with the last bucket
};

}  // namespace brimful
