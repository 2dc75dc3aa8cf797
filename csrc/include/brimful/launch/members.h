#pragma once
#include <brimful/export.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;  // defined in <torch/csrc/distributed/c10d/ProcessGroup.hpp>
class Store;         // defined in <torch/csrc/distributed/c10d/Store.hpp>
}  // namespace c10d

namespace brimful {

/// The others formed a group without this process: they took it for dead, or did not wait for it any longer. What it has
/// is out of date; it may join the next group as a new member.
class BRIMFUL_API LeftOut : public c10::Error {
 public:
  explicit LeftOut(const std::string& message);
};

/// The store through which ranks find each other is gone, so that no group can be formed any more.
class BRIMFUL_API StoreLost : public c10::Error {
 public:
  explicit StoreLost(const std::string& message);
};

/// The same for all processes.
struct MembersOptions {
  int world_size = 1;  ///< of the first group; later ones have whoever is there
  std::chrono::milliseconds heartbeat{50};    ///< how often a process says that it lives
  std::chrono::milliseconds dead_after{400};  ///< without that
  /// How long a new group waits for a member that lives and does not come, and the first group for its ranks.
  std::chrono::milliseconds patience{300000};
  std::chrono::milliseconds connect{5000};     ///< for the ranks of a new group to connect
  std::chrono::milliseconds timeout{1800000};  ///< of the group's collectives
  std::optional<c10::Device> device = {};      ///< with CUDA, its tensors go over NCCL
  // Of a pipeline over several processes, which go on together or not at all.
  std::string replica;    ///< the pipeline's name, the same for its ranks alone
  int pipeline_rank = 0;  ///< this process's
  int pipeline_size = 1;  ///< the same for all
};

/// One of the groups that follow each other.
struct Membership {
  /// Of the processes that have the same rank of each pipeline: all, where pipelines have one.
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  int64_t epoch = 0;  ///< the group's number, from 1
  int rank = 0;
  int world_size = 1;
  std::vector<std::string> names;  ///< by rank
  double waited_ms = 0;            ///< for the other members to come, or to be known as dead
  /// Of this process's pipeline, the same in all groups that follow; null where it has one rank.
  c10::intrusive_ptr<c10d::ProcessGroup> pipeline_group;
};

/// A process among those that train together, through a store that outlives each of them. Groups are numbered: each has the
/// processes of the one before it that live, in their order, and behind them those that have joined. Whoever lives is known
/// by a thread of each process, which writes to the store; a process that is busy is waited for, and one that is dead is
/// not. One list a group is put into the store, by the first that may, so that a process which was cut off never
/// goes on by itself. Not thread-safe.
class BRIMFUL_API Members {
 public:
  /// Begins to say that this process lives. `name` is for messages.
  /// @throws c10::ValueError for options that contradict each other; StoreLost
  Members(const c10::intrusive_ptr<c10d::Store>& store, std::string name,
          MembersOptions options = {});
  /// Leaves.
  ~Members();
  Members(const Members&) = delete;
  Members& operator=(const Members&) = delete;

  /// The next group. The first one is there when `world_size` processes have come; a process that comes later asks the
  /// members to form the next one after their step (Outcome::regroup). A member calls it when a rank has failed, or all
  /// were asked. `model`: of the program and the model, which must be alike; a process with another one is refused before
  /// it is in; `part` is of this rank's part of the model, where pipelines have several. A replica is in a group with all its
  /// ranks or with none: LeftOut names the one that died. Returns when the ranks are connected.
  /// @throws PlanMismatch for another `model`; LeftOut; StoreLost; c10::DistError where no process lets it in within
  /// `patience`, and to one that comes later at once where all members have left
  Membership enter(const std::string& model, const std::string& part = {});
  /// Waits until all processes of the group, those of all ranks of all pipelines, have come to a place that has this name,
  /// once in a group. False where one of them has died, is not `ready` or does not come within `patience`: for all.
  /// @throws StoreLost
  bool meet(const std::string& place, bool ready = true);
  int pipeline_size() const;
  /// The others need not wait for this process from now on.
  void leave() noexcept;

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace brimful
