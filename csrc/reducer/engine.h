#pragma once
#include <brimful/step/participant.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reducer/attempt.h"
#include "reducer/gradient_hooks.h"
#include "reducer/launcher.h"
#include "reducer/place.h"
#include "reducer/plan_tuner.h"
#include "reducer/record_transport.h"
#include "reducer/shared_step.h"
#include "reducer/updates.h"

namespace brimful {

/// Who begins the steps that no StepGroup begins. The engine asks it at the borders of steps, never within.
class EngineDriver {
 public:
  virtual ~EngineDriver() = default;
  /// A gradient has come outside of a step; `lock` is the attempt's. False: it stays this rank's own.
  virtual bool begin_backward(Attempt::Lock& lock) = 0;
  /// The engine has thrown this from the hook of a gradient, in a backward of the driver's.
  virtual void note_error(std::exception_ptr error) = 0;
  /// A loss of this gradient begins a backward too. False for a leaf.
  virtual bool watch_gradient(const at::Tensor& gradient) = 0;
  /// A step that the driver does not begin is about to, or an exchange: settles what the driver's own steps owe.
  virtual void give_way(bool to_step) = 0;
  /// The ranks are in steps of different models, or one has failed, as all of them know.
  [[noreturn]] virtual void throw_step_ended(const SharedStep& step) = 0;
};

/// A reducer's part of steps: takes gradients as they come (place.h), launches full buckets in order (launcher.h), and ends
/// the step with one wait (finish.cpp). Its state is its own: others see some of the objects that it consists of, and
/// change the attempt by what these and the engine do.
class Engine final : public ParticipantAttempt {
 public:
  explicit Engine(const Group& group) : link_(group) {}
  /// All ranks have agreed on the plan. `updates` compares the ranks' parameters; none: they are not compared.
  void set_up(BucketSet layout, BucketPlan plan, std::optional<Updates> updates);
  /// Adds the hooks of gradients, which hold `self` weakly.
  void attach(std::weak_ptr<Engine> self, EngineDriver& driver);

  GroupLink& link() { return link_; }
  const GroupLink& link() const { return link_; }
  Attempt& attempt() { return attempt_; }
  const Attempt& attempt() const { return attempt_; }
  const BucketSet& layout() const { return layout_; }
  const RecordTransport& transport() const { return *transport_; }
  GradientHooks& gradient_hooks() { return gradient_hooks_; }
  HookChain& hooks() { return hooks_; }
  PlanTuner& tuner() { return tuner_; }
  Stopwatch& watch() { return watch_; }

  // ParticipantAttempt's that the driver calls too.
  Progress progress() const override;
  void launch_early(Fill fill) override;
  Ending finish() override;
  void accept(double scale, bool keep_unused) override;
  void discard() override;

  /// Before anything of the step leaves: are all ranks in it? False: nothing may.
  bool open_step();
  /// They have agreed that they are, or no rank asks.
  bool has_opened() const { return opened_; }
  /// Before other collectives, between steps. `settles`: what the driver's own steps owe comes first.
  /// @throws PlanMismatch, RankFailed if the others are in a step
  void open_exchange(bool settles);
  /// All ranks set the same hook between steps, or none.
  void set_hook(std::unique_ptr<c10d::CommHookInterface> hook);
  bool replace_buffer(const at::Tensor& before, const at::Tensor& now) {
    return layout_.tail->replace(before, now);
  }

  // For the driver.
  /// A backward of a plain loop, or what stands in for one, under the attempt's lock. `step`: of the reducers that it
  /// reaches; null: it ends none.
  void begin_plain(const Scales& scales, int buffer_source, std::shared_ptr<SharedStep> step,
                   bool launches);
  /// No backward runs any more; what was launched is still waited for.
  void leave_backward();
  /// In place of accept(), on a rank that only made the others' collectives.
  void accept_nothing();
  /// Ends an attempt that leaves nothing behind, and is none.
  /// @throws RankFailed if the process group broke
  void give_up();
  /// All ranks have the same parameters now.
  void forget_updates();

 private:
  // ParticipantAttempt's that only a step calls.
  void begin(int buffer_source) override;
  void set_order(ParticipantAttempt* before, ParticipantAttempt* after) override;
  void begin_piece(bool last, const at::Tensor& loss) override;
  void advance() override;
  bool launched_early() const override { return launcher_.launched_early(); }
  void launch_last(Fill fill, const Announcement& said) override;
  void abandon() override;

  void on_gradient(int64_t parameter, const at::Tensor& gradient);
  void take(int64_t parameter, const at::Tensor& gradient);
  void throw_late(int64_t parameter);
  void lay_out(BucketPlan plan);
  void take_up_plan();
  void start_backward(bool launching);
  void advance_early();
  void launch();
  void launch_until(int64_t end, Fill fill, const Announcement* said);
  void write_tail();
  void write_back_buffers();
  void end_attempt();
  void end_unmade();
  bool looks_at_updates() const { return updates_ && !attempt_.is_uneven(); }

  /// Of gradients that come again.
  struct Late {
    bool came = false;         ///< a gradient came after its bucket was launched
    int graph_task = -1;       ///< of the backward that a step runs
    bool reentrant = false;    ///< a gradient came in another graph task: it may come again
    bool launch_late = false;  ///< learned from that: all buckets are launched after backward
  };

  GroupLink link_;
  BucketSet layout_;
  HookChain hooks_{link_};
  PlanTuner tuner_{link_};
  Stopwatch watch_;
  Attempt attempt_;
  Placement placement_{layout_, hooks_, attempt_};
  Launcher launcher_{link_, layout_, hooks_, watch_};
  std::unique_ptr<RecordTransport> transport_;
  std::shared_ptr<SharedStep> step_ = std::make_shared<SharedStep>();
  bool opened_ = false;    ///< the ranks have agreed to be in the step
  Announcement outgoing_;  ///< with the last bucket
  Late late_;
  std::optional<Updates> updates_;  ///< where there are other ranks
  GradientHooks gradient_hooks_;
  EngineDriver* driver_ = nullptr;
  std::weak_ptr<Engine> self_;
};

}  // namespace brimful
