#pragma once
#include <brimful/step/participant.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "reducer/engine_state.h"

namespace brimful {

/// Who begins the steps that no StepGroup begins. The engine asks it at the borders of steps, never within.
class EngineDriver {
 public:
  virtual ~EngineDriver() = default;
  /// A gradient has come outside of a step; `lock` is on the attempt's mutex. False: it stays this rank's own.
  virtual bool begin_backward(std::unique_lock<std::mutex>& lock) = 0;
  /// The engine has thrown this from the hook of a gradient, in a backward of the driver's.
  virtual void note_error(std::exception_ptr error) = 0;
  /// A loss of this gradient begins a backward too.
  virtual void watch_gradient(const at::Tensor& gradient) = 0;
  /// A step that the driver does not begin is about to, or an exchange: settles what the driver's own steps owe.
  virtual void give_way(bool to_step) = 0;
  /// The ranks are in steps of different models, or one has failed, as all of them know.
  [[noreturn]] virtual void throw_turn_ended() = 0;
};

/// Moves gradients into buckets as they come and launches these in order: each gradient is moved while the caches still
/// hold it and p.grad becomes a view, or stays where it is if it is large (place.cpp); what did not come is filled in.
/// Buckets are launched in order (launch.cpp), and one wait ends the step (finish.cpp).
class Engine final : public ParticipantAttempt {
 public:
  explicit Engine(const Group& group) : s_(group) {}

  /// Adds the hooks of gradients, which hold `self` weakly.
  void attach(std::weak_ptr<Engine> self, EngineDriver& driver);
  void remove_hooks();
  EngineState& state() { return s_; }
  const EngineState& state() const { return s_; }

  // ParticipantAttempt: driven by a StepGroup or by the driver.
  void begin(int buffer_source) override;
  void set_order(ParticipantAttempt* before, ParticipantAttempt* after) override;
  void begin_piece(bool last, const at::Tensor& loss) override;
  void advance() override;
  bool launched_early() const override;
  Progress progress() const override;
  void launch_early(Fill fill) override;
  void launch_last(Fill fill, const Announcement& said) override;
  Ending finish() override;
  void abandon() override;
  void accept(double scale, bool keep_unused) override;
  void discard() override;

  /// Every rank's bytes, for `what`. @throws RankFailed
  std::vector<std::vector<uint8_t>> gather_bytes(const std::vector<uint8_t>& own, const char* what);
  /// As Participant's, of the attempt under way.
  std::vector<at::Tensor> gather(const at::Tensor& own);
  void sum(at::Tensor& tensor);
  /// All ranks set the same hook between steps, or none.
  void set_hook(std::unique_ptr<c10d::CommHookInterface> hook);

  // For the driver.
  void take_up_plan();
  /// Under the attempt's mutex.
  void begin_plain(const Scales& scales, int buffer_source);
  void start_backward(bool launching);
  /// In place of accept(), on a rank that only made the others' collectives.
  void accept_nothing();
  /// Ends an attempt that leaves nothing behind, and is none.
  /// @throws RankFailed if the process group broke
  void give_up();
  /// Agrees with the other ranks, where there are several reducers, that this is no step, before other collectives.
  void exchange_in_turn();

 private:
  void on_gradient(int64_t parameter, const at::Tensor& gradient);
  void take(int64_t parameter, const at::Tensor& gradient);
  void on_late_gradient(int64_t parameter);
  void place(int64_t parameter, const at::Tensor& arrived);
  void place_direct(int64_t parameter, const at::Tensor& arrived);
  void add_again(int64_t parameter, const at::Tensor& gradient);
  void fill(int64_t index);
  void lay_out(BucketPlan plan);
  void advance_early();
  void open_turn();
  void call_in_attempt(const std::function<c10::intrusive_ptr<c10d::Work>()>& collective);
  void launch(int64_t index);
  void launch_drained(int64_t index, Fill fill);
  void launch_until(int64_t end, Fill fill, const Announcement* said);
  void send(int64_t index);
  void exchange_rows();
  void write_back_buffers();
  void wait_for_buckets();
  void end_attempt();
  void end_unmade();
  void forget_attempt();
  void end_turn();

  EngineState s_;
  EngineDriver* driver_ = nullptr;
  std::weak_ptr<Engine> self_;
  std::vector<uintptr_t> hook_keys_;
};

/// Every rank's record, between steps. A collective.
/// @throws RankFailed if the process group broke
std::vector<ControlRecord> exchange_records(Engine& engine, const ControlRecord& record);

}  // namespace brimful
