#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/export.h>
#include <brimful/step/control_record.h>
#include <brimful/step/failure.h>
#include <brimful/step/kept_batch.h>
#include <brimful/step/participant.h>
#include <brimful/step/piece_work.h>

#include <memory>
#include <string>
#include <vector>

namespace brimful {
class KeptGradients;

/// The participants of a step in launch order, as one. Gradients of parameters outside them (a single process) are
/// scaled and emptied with theirs. Not thread-safe.
class BRIMFUL_API StepGroup {
 public:
  /// @throws c10::ValueError if two participants differ in rank or world size
  StepGroup(std::vector<std::shared_ptr<Participant>> participants,
            std::vector<at::Tensor> outside);

  int rank() const;
  int world_size() const;
  void require_one_group() const;  ///< throws as the constructor
  int64_t step() const;
  /// One collective; a group without participants answers by itself.
  std::vector<ControlRecord> exchange(const ControlRecord& record);
  /// @throws c10::ValueError if a gradient is there and not zero; zero ones are emptied (may synchronise the device)
  void require_empty_gradients();

  /// @throws c10::ValueError if parameters that are trained lie on several devices
  void require_one_device() const;
  /// Takes part in a step that has failed here before it began; `meets`: one whose prologue begins with meet().
  std::vector<ControlRecord> run_failed(FailureKind kind, const std::string& text,
                                        const ControlRecord& record, bool meets = false);

  /// Sets gradients of earlier steps aside, for kept() to add to those that accept() makes.
  void keep_gradients();
  KeptGradients& kept() { return *kept_; }

  // An attempt, whose work another class runs, in parts: begin_attempt(), then the work, in which begin_piece() is the
  // caller's to call, then complete(), or drain() where any of it failed, and always finish(), which
  // has the records of all ranks.
  void begin_attempt(int buffer_source);
  void complete(const Announcement& said);
  void drain(ControlRecord record, Status verdict);
  /// `late`: the losses of an attempt that stands may be left to late_sums(), which waits for no device.
  /// @throws RankFailed if the process group broke
  std::vector<ControlRecord> finish(bool late = false);
  /// In place of complete() and finish(), where this rank cannot match the others' collectives: posts its failure and aborts
  /// the groups.
  void abandon(FailureKind kind, const std::string& text);
  /// A gradient of this attempt came after its bucket was launched.
  bool late_gradient() const;

  /// Of the attempt that finish() ended, as Ending::divergence: of the first participant that returns a text.
  const std::string& divergence() const { return divergence_; }
  /// Of the attempt that finish(true) ended; null if the records have them.
  const std::shared_ptr<const LateSums>& late_sums() const { return late_sums_; }
  /// The records with them. Waits for the device.
  std::vector<ControlRecord> with_losses(std::vector<ControlRecord> records) const;
  const std::vector<std::shared_ptr<Participant>>& participants() const { return participants_; }
  /// Parameters that are trained, and whose gradients stay on this rank.
  const std::vector<at::Tensor>& outside() const { return outside_; }
  void accept(double scale, bool keep_unused);
  void discard();
  /// What the ranks whose records say that they failed have posted; waits a second for each at most.
  std::vector<Failure> failures(const std::vector<ControlRecord>& records);
  void publish_failure(FailureKind kind, const std::string& text);

 private:
  void launch(Fill fill, const Announcement& said);
  /// Without participants.
  Ending end_alone();

  std::vector<std::shared_ptr<Participant>> participants_;
  std::vector<at::Tensor> outside_;
  std::shared_ptr<KeptGradients> kept_;
  Announcement own_;  ///< of a group without participants
  std::string divergence_;
  std::shared_ptr<const LateSums> late_sums_;
};

/// As Participant::follow_group() of all participants: true if any has other members now. Before a step.
BRIMFUL_API bool follow_group(const StepGroup& group);

}  // namespace brimful
