#pragma once
#include <brimful/reducer/reducer.h>
#include <brimful/step/failure.h>
#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/thrown_by.h"
#include "reducer/agree.h"
#include "reducer/host_group.h"
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
  std::string configuration;  ///< of the group's members

  explicit GroupLink(Group of);
  /// Lets go of the group when the process ends.
  void release() {
    group.reset();
    hosts_.reset();
  }
  /// For open_board(): of the group's reducers, as far as this rank knows.
  uint64_t next_number();
  /// Makes key and board, which are the same on all ranks. `of_reducer`: the largest of the ranks' numbers.
  void open_board(uint64_t of_reducer, c10::Device of_last_bucket);
  /// A single rank makes its collectives too: a communication hook expects them.
  void end_short_way() { alone = false; }
  /// There are collectives of other reducers, which must not meet this one's.
  bool takes_turns() const { return !broken_ && !alone && traffic->several; }

  /// No collective is possible any more.
  bool is_broken() const { return broken_ != nullptr; }
  /// The first error of the process group; null for none.
  const std::exception_ptr& error() const { return broken_; }
  /// The group has broken, if `error` is one and the first.
  void fail(std::exception_ptr error) { broken_ = broken_ ? broken_ : std::move(error); }
  /// A wait for the other ranks begins, which throw_broken() counts from here.
  void begin_wait() { waiting_since_ = Clock::now(); }
  Clock::time_point waiting_since() const { return waiting_since_; }
  /// From then on communication hooks are not waited for any more: the process ends. None: no bound.
  void end_hooks_at(std::optional<Clock::time_point> deadline) { hook_deadline_ = deadline; }
  /// Whether another rank has found the group broken.
  bool is_given_up();
  /// Before a collective: a rank that was away for long asks whether the others have given up. What it then calls no
  /// rank matches, and torch's watchdog ends a process for that.
  /// @throws std::runtime_error if they have, or if the group's backend has found an error
  void require(c10::Device of);
  /// A rank that waits for one that is well does not notice that the group broke: it would wait until the group's timeout.
  /// `also`: called twice a second meanwhile; what it throws ends the wait. `since`: when the wait began; none: by begin_wait().
  void wait_for(c10d::Work& work, c10::Device of, const std::function<void()>& also = nullptr,
                std::optional<Clock::time_point> since = std::nullopt);
  /// For a communication hook's; where that does not come, the group is broken.
  void wait_for(c10::ivalue::Future& future);
  /// Calls `fn`, which calls the group: what it throws breaks the link.
  template <typename Fn>
  void call(const Fn& fn) {
    if (auto error = thrown_by(fn)) {
      broken_ = std::move(error);
    }
  }
  /// Every rank's bytes, by rank, for `what`. A collective.
  /// @throws RankFailed
  std::vector<std::vector<uint8_t>> exchange(const std::vector<uint8_t>& own, int64_t at_step,
                                             const std::string& what);
  /// With the hosts', which other reducers of the group have too.
  void abort();

  /// By which a reducer's control records go; null: they go in its last bucket.
  const std::shared_ptr<HostGroup>& hosts() const { return hosts_; }
  void use_hosts(std::shared_ptr<HostGroup> hosts) { hosts_ = std::move(hosts); }

  /// Counts what it has done since the reducer was made.
  void count(int64_t Reducer::Counters::*what, int64_t more = 1) { counters_.*what += more; }
  const Reducer::Counters& counters() const { return counters_; }
  /// Counts on from a link of the reducer to another group.
  void count_on_from(const GroupLink& before) {
    counters_ = before.counters_;
    ++counters_.regroups;
  }

  /// This rank cannot make collectives that the others wait for.
  void give_up(std::exception_ptr error, int64_t at_step);
  /// @throws RankFailed with the ranks that are missing
  [[noreturn]] void throw_broken(int64_t at_step, const std::string& waiting_for,
                                 const std::string& cause);
  /// The same for what is being waited for in a step, if the group is broken.
  void require_whole(int64_t at_step, const std::string& waiting_for);

 private:
  std::shared_ptr<HostGroup> hosts_;
  Reducer::Counters counters_;
  std::exception_ptr broken_;
  Clock::time_point waiting_since_;  ///< of the last wait for others; max: none
  Clock::time_point required_at_;    ///< the group, before the last collective
  std::optional<Clock::time_point> hook_deadline_;
};

/// The group's members were changed in place: all that the link knows is of those before.
bool is_reconfigured(const GroupLink& link);
/// That of another reducer of the link's group.
FailureBoard board_of(const GroupLink& link, uint64_t of_number);

}  // namespace brimful
