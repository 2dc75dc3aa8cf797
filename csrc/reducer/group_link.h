#pragma once
#include <brimful/step/failure.h>
#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/thrown_by.h"
#include "reducer/agree.h"
#include "reducer/owners.h"
#include "step/failure_board.h"

namespace c10::ivalue {
struct Future;
}

namespace brimful {

/// A reducer's process group: waits that end when another rank has given up, and what ranks post of their failures.
struct GroupLink {
  using Clock = std::chrono::steady_clock;

  Group group;
  c10::intrusive_ptr<c10d::Store> store;  ///< null where the group has none
  std::optional<FailureBoard> board;      ///< in the store
  std::string key;                        ///< prefix in the store, equal on all ranks
  uint64_t number = 0;                    ///< among the group's reducers, equal on all ranks
  int rank = 0;
  int world_size = 1;
  bool alone = false;  ///< a single rank that takes the short way: nothing to send
  c10::Device device = c10::Device(c10::DeviceType::CPU);  ///< the last bucket's
  std::shared_ptr<GroupTraffic> traffic;
  std::string configuration;                       ///< of the group's members
  std::exception_ptr broken;                       ///< the first error of the process group
  Clock::time_point waiting_since;                 ///< of the last wait for others; max: none
  Clock::time_point required_at;                   ///< the group, before the last collective
  std::optional<Clock::time_point> hook_deadline;  ///< of a process that ends

  explicit GroupLink(Group of);
  /// The group's members were changed in place: all that is here is of those before.
  bool is_reconfigured() const;
  /// For open_board(): of the group's reducers, as far as this rank knows.
  uint64_t next_number();
  /// Makes key and board, which are the same on all ranks. `of_reducer`: the largest of the ranks' numbers.
  void open_board(uint64_t of_reducer);
  /// There are collectives of other reducers, which must not meet this one's.
  bool takes_turns() const { return !broken && !alone && traffic->several; }
  /// That of another reducer of the group.
  FailureBoard board_of(uint64_t of_number) const;
  /// Whether another rank has found the group broken.
  bool is_given_up();
  /// Before a collective: a rank that was away for long asks whether the others have given up. What it then calls no
  /// rank matches, and torch's watchdog ends a process for that.
  /// @throws std::runtime_error if they have, or if the group's backend has found an error
  void require(c10::Device of);
  /// A rank that waits for one that is well does not notice that the group broke: it would wait until the group's timeout.
  void wait_for(c10d::Work& work, c10::Device of) { wait_for(work, of, waiting_since); }
  /// `also`: called twice a second meanwhile; what it throws ends the wait. Optional.
  void wait_for(c10d::Work& work, c10::Device of, Clock::time_point since,
                const std::function<void()>& also = nullptr);
  /// For a communication hook's; where that does not come, the group is broken.
  void wait_for(c10::ivalue::Future& future);
  /// Calls `fn`, which calls the group: what it throws breaks the link.
  template <typename Fn>
  void call(const Fn& fn) {
    if (auto error = thrown_by(fn)) {
      broken = std::move(error);
    }
  }
  void abort();
  /// This rank cannot make collectives that the others wait for.
  void give_up(std::exception_ptr error, int64_t at_step);
  /// @throws RankFailed with the ranks that are missing
  [[noreturn]] void throw_broken(int64_t at_step, const std::string& waiting_for,
                                 const std::string& cause);
};

}  // namespace brimful
