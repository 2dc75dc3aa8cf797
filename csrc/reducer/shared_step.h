#pragma once
#include <brimful/step/failure.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "reducer/group_link.h"

namespace brimful {

enum class TurnKind : uint64_t { plain, managed, close, exchange, failed };

/// What a rank says where the ranks agree.
struct Turn {
  TurnKind kind = TurnKind::plain;
  uint64_t number = 0;  ///< of the reducer, among the group's
  uint64_t detail = 0;  ///< managed: of the step's other reducers; failed: the Status
  uint64_t others = 0;  ///< reducers of the group besides this one
};

/// What the reducers of a group have in common that are in one step: whether all ranks are in it. What they send would match
/// whatever another rank sends at the same time: a bucket of another model would be summed with this one's, or end the
/// process (gloo). So before the first bucket of a step the ranks agree, in a small all_gather, which model it is of, and
/// in a plain loop, before the last ones, that backward has ended; a rank whose step died says so in the place of either.
/// A lone reducer asks no other rank.
class SharedStep {
 public:
  /// Before a step of these reducers begins: a StepGroup's, in launch order.
  void add(uint64_t number) { numbers_.push_back(number); }
  /// Before the first bucket of a reducer: are all ranks in this step, or `managed` in the same StepGroup's?
  void open(GroupLink& link, bool managed);
  /// Before the last buckets: are all ranks at the end of their backward? False: nothing more may be launched.
  bool close(GroupLink& link);
  /// Before other collectives of a reducer. False: the others are in a step.
  bool open_exchange(GroupLink& link);
  /// The ranks have agreed that backward has ended.
  bool is_closed() const { return closed_; }
  /// They are not all in this step: nothing more is launched.
  bool has_ended() const { return ended_; }
  void end() { ended_ = true; }
  /// @throws what `raise` has thrown the first time
  [[noreturn]] void throw_ended(const std::function<void()>& raise);
  /// What breaks the group for one reducer of the step has broken it for all.
  void share_error(GroupLink& link);

  /// This rank's step died: says so where the ranks agree next, which may be about another model.
  void part(GroupLink& link, FailureKind kind);
  bool has_parted() const { return parting_.has_value(); }
  bool knows_parting() const { return !parting_ || parting_->work->isCompleted(); }
  void wait_for_parting(GroupLink& link);
  /// For the ranks that learn of it.
  void post_parting(const GroupLink& link, const Failure& failure) const;

  /// By rank: what it said when the ranks last agreed.
  const std::vector<Turn>& said() const { return said_; }
  /// What the rank that said `turn` has posted; waits a second at most.
  Failure failure_of(const GroupLink& link, const Turn& turn, int rank) const;

 private:
  void agree(GroupLink& link, Turn own);
  std::string place_of(int rank) const;

  std::vector<uint64_t> numbers_;
  bool opened_ = false;  ///< a StepGroup's
  bool closed_ = false;
  bool ended_ = false;
  std::vector<Turn> said_;
  int64_t number_ = 0;  ///< of the last agreement
  std::optional<Exchange> parting_;
  uint64_t parting_number_ = 0;  ///< of which reducer
  std::exception_ptr error_;     ///< of the group
  std::exception_ptr thrown_;
};

}  // namespace brimful
