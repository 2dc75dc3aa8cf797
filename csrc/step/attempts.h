#pragma once
#include <brimful/step/participant.h>

#include <functional>
#include <utility>
#include <vector>

namespace brimful {

/// What a step's participants owe the other ranks, as one: in launch order, the early buckets of all before the first last
/// one. A StepGroup's, and a plain backward's over several reducers.
class StepAttempts {
 public:
  explicit StepAttempts(std::vector<ParticipantAttempt*> in_order) : all_(std::move(in_order)) {}

  /// Until finish().
  void set_order() const;
  /// `closes`: whether the last buckets may be launched, asked before them. Optional.
  void launch(Fill fill, const Announcement& said,
              const std::function<bool()>& closes = nullptr) const;
  /// Ends all of them whatever happens. A rank's verdict is the worst of its records, the divergence that of the first
  /// that has one.
  /// @throws what the first of them throws that does
  Ending finish() const;

 private:
  std::vector<ParticipantAttempt*> all_;
};

}  // namespace brimful
