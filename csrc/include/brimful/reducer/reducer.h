#pragma once
#include <brimful/export.h>
#include <brimful/step/participant.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace brimful {

struct ReducerOptions {
  double bucket_cap_mb = 25;
  double first_bucket_cap_mb = 1;
  bool broadcast_buffers =
      true;  ///< buffers agree after every step: those of the lowest rank that had data
  bool synchronise_at_start = true;  ///< give all ranks the parameters and buffers of rank 0
  std::vector<std::string> names;    ///< of the parameters, for messages
  std::vector<bool> sparse;          ///< by parameter: its gradient will be a sparse tensor
};

/// Sums gradients over the ranks of a process group in buckets that leave during backward. One collective a bucket and
/// none beside: verdicts, losses, weights and buffers ride in the last bucket. Driven by a step (the Participant
/// interface), or by itself in a plain loop: then gradients become the mean over ranks, as with torch's DDP, and a
/// failure of another rank is raised from backward(). Not thread-safe, but hooks may run on any autograd thread.
class BRIMFUL_API Reducer final : public Participant, public std::enable_shared_from_this<Reducer> {
 public:
  /// A collective: all ranks construct at the same time.
  /// @throws PlanMismatch on every rank if their models differ; c10::ValueError if no parameter needs a gradient or
  /// the group is null
  static std::shared_ptr<Reducer> create(std::vector<at::Tensor> parameters,
                                         std::vector<at::Tensor> buffers,
                                         const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                         const ReducerOptions& options = {});
  ~Reducer() override;
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // In a plain loop (see plain.cpp).
  /// Before the module's forward: settles a step that failed on this rank, so that the other ranks learn of it.
  void prepare_forward();
  /// After it, for each output that needs a gradient: its backward is the beginning of the step's backward.
  void watch(const at::Tensor& output);
  void forward_done();
  /// False: gradients only accumulate, as under no_sync(). Read when backward runs.
  void set_sync(bool sync);
  bool sync() const;
  /// Until end_scope() a failure of this rank is announced by end_scope, which knows its words.
  void begin_scope();
  void end_scope_ok();
  void end_scope_failed(FailureKind kind, const std::string& text);
  /// Announces that this rank cannot do its part of the step: launches what it owes, waits at most `patience_ms`.
  void announce_failure(FailureKind kind, const std::string& text, int64_t patience_ms);
  /// True while the other ranks wait, or may come to wait, for a step that this rank has begun.
  bool owes() const;
  /// Leaves word of a failure without any collective, for ranks that find the group broken.
  void leave_word(FailureKind kind, const std::string& text);

  /// Counted since construction, for tests and reports.
  struct Counters {
    int64_t steps = 0;
    int64_t launches = 0;
    int64_t host_waits = 0;
    int64_t exchanges = 0;
  };
  Counters counters() const;
  std::string plan() const;

  // Participant.
  int rank() const override;
  int world_size() const override;
  int64_t step() const override;
  const std::vector<at::Tensor>& parameters() const override;
  std::vector<ControlRecord> exchange(const ControlRecord& record) override;
  void begin_attempt(int buffer_source) override;
  void begin_piece(bool last) override;
  void backward_began(int graph_task) override;
  void set_record(const ControlRecord& record, const at::Tensor& loss_sum) override;
  bool gradients_complete() const override;
  void complete(Part part) override;
  void drain(Part part) override;
  std::vector<ControlRecord> finish() override;
  void accept(double scale, bool keep_unused) override;
  void discard() override;
  int64_t launched() const override;
  int64_t buckets() const override;
  bool late_gradient() const override;
  void set_order(Participant* before, Participant* after) override;
  bool early_left() const override;
  void advance() override;
  void publish_failure(FailureKind kind, const std::string& text) override;
  std::string read_failure(int rank, int64_t patience_ms) override;
  void abandon(FailureKind kind, const std::string& text) override;
  std::optional<PeerFailure> failed_peer() override;

 private:
  struct State;
  explicit Reducer(std::unique_ptr<State> state);
  void add_hooks();
  void on_gradient(int64_t parameter, const at::Tensor& gradient);
  void on_late_gradient(int64_t parameter);
  void start_backward(bool launching);
  void require_unchanged(int64_t parameter, const at::Tensor& gradient);
  void place(int64_t parameter);
  void add_again(int64_t parameter, const at::Tensor& gradient);
  void fill(int64_t bucket);
  void launch(int64_t bucket);
  void advance_early();
  void wait_for_buckets();
  void end_attempt();
  [[noreturn]] void throw_broken(int64_t at_step, const std::string& waiting_for,
                                 const std::string& cause);
  void abort_group();
  void wait_for(c10d::Work& work, bool on_cpu);
  bool told_broken();
  bool begin_plain_backward();
  void end_plain_backward();
  void plain_backward_died() noexcept;
  void abort_step(FailureKind kind, const std::string& text);
  void settle();

  std::unique_ptr<State> s_;
};

}  // namespace brimful
