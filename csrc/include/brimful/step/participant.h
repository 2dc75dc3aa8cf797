#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>
#include <brimful/step/control_record.h>
#include <brimful/step/failure.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace brimful {
class FailureBoard;
class LateSums;

/// What a rank says of its step in its last bucket. `loss_sum` (0-dim, float64), where defined, is for record.loss_sum;
/// `late_weight` (the same, on a device) for record.weight, which is kLateWeight then.
struct Announcement {
  ControlRecord record;
  at::Tensor loss_sum = {};
  at::Tensor late_weight = {};
};

/// What a bucket carries: this rank's gradients, and zeros where there are none; zeros; or whatever needs no memory, where
/// the sum is of no use.
enum class Fill : uint8_t { gradients, zeros, anything };

/// What a participant's attempt has come to.
struct Progress {
  int64_t launched = 0;  ///< buckets, of `buckets`
  int64_t buckets = 0;
  bool complete = false;  ///< every parameter got its gradient, and none can come again
  bool late = false;      ///< a gradient came after its bucket was launched: the step repeats
};

/// How all ranks ended an attempt.
struct Ending {
  std::vector<ControlRecord> records;  ///< by rank
  /// How the ranks' parameters differ, because not all of them were updated; empty where they agree. Alike on all ranks.
  /// An attempt that ends with a text must not be accepted.
  std::string divergence;
  /// Of an attempt that stands: where a device computes the losses still, and the records have none.
  std::shared_ptr<const LateSums> sums = nullptr;
};

/// What a participant knows of collectives within the model, which this rank must issue whatever happens to it.
enum class InnerCollectives : uint8_t {
  none,       ///< there are none, or they are not this participant's
  unlearned,  ///< two pieces of few rows, run on all ranks, show them
  known,      ///< a rank that fails issues those that are left
  lost        ///< a piece had others: a rank that fails cannot
};

/// A participant's part of an attempt, driven by one thread in the order of these calls. Whatever happens between begin()
/// and finish(), both launches are made, so that a rank which fails still sends all that the others wait for.
class BRIMFUL_API ParticipantAttempt {
 public:
  virtual ~ParticipantAttempt() = default;
  /// From here until finish() the step owns the reducer. `buffer_source`: whose buffers win.
  virtual void begin(int buffer_source) = 0;
  /// Launch order: no bucket is launched before the early ones of `before` were; `after` is advanced then. Until finish().
  virtual void set_order(ParticipantAttempt* before, ParticipantAttempt* after) = 0;
  /// A piece's forward comes.
  virtual void begin_forward() {}
  /// Early buckets may be launched during the backward of the last piece. `loss`, if defined, is where that backward begins.
  virtual void begin_piece(bool last, const at::Tensor& loss) = 0;
  /// Launches the early buckets whose turn it is.
  virtual void advance() = 0;
  /// The early buckets were launched.
  virtual bool launched_early() const = 0;
  virtual Progress progress() const = 0;
  /// Launches the buckets that were not launched yet, up to the last one. Over several participants, all of this comes before the first last
  /// bucket, in their order. Once more it has nothing left to do.
  virtual void launch_early(Fill fill) = 0;
  /// Whether Announcement::late_weight may be defined.
  virtual bool takes_late_weight() const { return false; }
  /// The last bucket, with what all ranks are to know of this one.
  virtual void launch_last(Fill fill, const Announcement& said) = 0;
  /// Waits for the records of all ranks, most often with all buckets in the one host wait of a step. Buckets that are not there
  /// yet are waited for by accept() or discard(). Ends the attempt whatever happens.
  /// @throws RankFailed if the process group broke
  virtual Ending finish() = 0;
  /// In place of all that is left: aborts the group, whose collectives this rank cannot match.
  virtual void abandon() = 0;
  /// Makes the sums in the buckets the step's gradients, times `scale`; `keep_unused`: leave None where no rank used it.
  /// @throws RankFailed if the process group broke before all of them had come
  virtual void accept(double scale, bool keep_unused) = 0;
  /// Empties the gradients: the buckets hold a useless sum.
  virtual void discard() = 0;
};

/// Something that owes collectives to other ranks in every step: a reducer. A step drives its participants.
class BRIMFUL_API Participant {
 public:
  virtual ~Participant() = default;
  /// Where the members of its group were changed in place since the last step: goes on with those that are in it now,
  /// which all call it before their next step. True then. Between steps.
  /// @throws RankFailed if one of them fails meanwhile
  virtual bool follow_group() { return false; }
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual int64_t step() const = 0;
  virtual const std::vector<at::Tensor>& parameters() const = 0;
  /// Those that the parameters have, as plain tensors: of a parameter that is divided over ranks this rank's part.
  virtual std::vector<at::Tensor> gradients() const;
  /// Where a rank posts its failure, and reads those of others.
  virtual const FailureBoard& board() const = 0;
  /// A collective of its own: every rank's record. Used once per loop, never per step.
  virtual std::vector<ControlRecord> exchange(const ControlRecord& record) = 0;
  /// A collective within an attempt, before any of its buckets: every rank's tensor, by rank, all of the same size and dtype, on
  /// the device of this one. Allocates beyond the memory limit.
  /// @throws RankFailed if the process group broke
  virtual std::vector<at::Tensor> gather(const at::Tensor& own) = 0;
  /// The same for the sum over the ranks, which takes the place of the tensor's values.
  virtual void sum(at::Tensor& tensor) = 0;
  virtual InnerCollectives inner_collectives() const { return InnerCollectives::none; }
  /// A collective of its own, before the pieces that show what is unlearned.
  /// @throws RankFailed if a rank failed before them, c10::ValueError on all ranks if one has no data
  virtual void begin_learning(bool /*has_data*/) {}
  /// A collective of its own, after them. Returns whether all ranks know now; else two more pieces may show it, unless
  /// these were the `last`.
  virtual bool end_learning(bool /*last*/) { return true; }
  /// Lives as long as the participant, or until it regroups.
  virtual ParticipantAttempt& attempt() = 0;
};

}  // namespace brimful
