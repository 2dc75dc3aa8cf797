#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>
#include <brimful/step/control_record.h>
#include <brimful/step/failure.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace brimful {

/// The last bucket carries the control record. It never leaves during backward, only when a step knows its own verdict.
enum class Part : uint8_t { early, last };

/// Something that owes collectives to other ranks in every step: a reducer. A step drives its participants, so that a
/// rank which fails still makes every call that the others wait for. Calls come from one thread, in the order below;
/// begin_piece(true) lets early buckets be launched during the backward that follows. Over several participants all early
/// buckets are launched before the first last one, each in the order of the participants.
class BRIMFUL_API Participant {
 public:
  virtual ~Participant() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual int64_t step() const = 0;
  virtual const std::vector<at::Tensor>& parameters() const = 0;

  /// A collective of its own: every rank's record. Used once per loop, never per step.
  virtual std::vector<ControlRecord> exchange(const ControlRecord& record) = 0;

  /// Starts an attempt: from here until finish() the step owns the reducer. `buffer_source`: whose buffers win.
  virtual void begin_attempt(int buffer_source) = 0;
  virtual void begin_piece(bool last) = 0;
  /// The piece's backward runs as this graph task of the engine; gradients of another one are reentrant.
  virtual void backward_began(int graph_task) = 0;
  /// What the last bucket will carry. `loss_sum` (0-dim, float64) stands in for record.loss_sum where it is defined.
  virtual void set_record(const ControlRecord& record, const at::Tensor& loss_sum) = 0;
  /// True if every parameter got its gradient, and none can come again: nothing of backward is missing.
  virtual bool gradients_complete() const = 0;
  /// Launches what has not left, filled from the gradients where there are any and with zeros elsewhere.
  virtual void complete(Part part) = 0;
  /// Launches what has not left, zeroed, without allocating; set_record() gave the verdict.
  virtual void drain(Part part) = 0;
  /// Waits for every bucket: the one host wait of a step. Ends the attempt whatever happens.
  /// @throws RankFailed if the process group broke
  virtual std::vector<ControlRecord> finish() = 0;
  /// Of the step that finish() ended: how the ranks' parameters differ, because not all of them were updated; empty where
  /// they agree. Alike on all ranks. A step that returns a text must not be accepted.
  virtual std::string divergence() const { return {}; }
  /// Makes the sums in the buckets the step's gradients, times `scale`; `keep_unused`: leave None where no rank used it.
  virtual void accept(double scale, bool keep_unused) = 0;
  /// Empties the gradients: the buckets hold a useless sum.
  virtual void discard() = 0;

  /// Buckets that have left in this step, of buckets().
  virtual int64_t launched() const = 0;
  virtual int64_t buckets() const = 0;
  /// True once a gradient came after its bucket was launched; such a step repeats with launches at the end of backward.
  virtual bool late_gradient() const = 0;

  /// Launch order within a step: no bucket is launched before the early ones of `before` were; `after` is nudged then.
  virtual void set_order(Participant* before, Participant* after) = 0;
  virtual bool early_left() const = 0;
  /// Launches the early buckets whose turn it is.
  virtual void advance() = 0;

  /// Posts this rank's failure for the others, and reads theirs (waits at most `patience_ms`).
  virtual void publish_failure(FailureKind kind, const std::string& text) = 0;
  virtual Failure read_failure(int rank, int64_t patience_ms) = 0;
  /// Ends the attempt of a rank that cannot match the collectives inside the model: posts its failure and aborts the group.
  virtual void abandon(FailureKind kind, const std::string& text) = 0;
  /// Another rank that has posted a failure in this step, if any; does not wait.
  virtual std::optional<Failure> failed_peer() = 0;
};

}  // namespace brimful
