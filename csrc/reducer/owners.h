#pragma once
#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace c10d {
class ProcessGroup;
}

namespace brimful {
class HostGroup;
class LoopDriver;
class PlainStep;

/// A group's collectives are made to end, by whoever finds that it must be. From any thread.
class GroupAbort {
 public:
  /// @throws what the group throws
  void abort(c10d::ProcessGroup& group);
  /// What ends from then on on the group's device has any values.
  bool has_begun() const { return begun_; }
  /// The group has other members.
  void forget() { begun_ = false; }

 private:
  std::mutex
      mutex_;  ///< torch's nccl2 joins its watchdog in abort(), which two threads must not do at once
  std::atomic<bool> begun_ = false;
};

/// What the reducers of a group share on this rank.
struct GroupTraffic {
  std::atomic<bool> several =
      false;  ///< there were others, on some rank, when the last one was made
  std::atomic<int64_t> numbers = 0;     ///< given so far where the group has no store to count them
  std::atomic<int64_t> turns = 0;       ///< agreed on, equal on all ranks
  std::atomic<double> agreeing_ms = 0;  ///< for the other ranks to agree
  /// Whether a rank is known to be dead; null where that is not watched. Set before the group is used.
  std::function<bool(int rank)> is_dead;
  GroupAbort aborting;
  std::string configuration;       ///< of the members that all of this is about
  std::weak_ptr<HostGroup> hosts;  ///< of the reducers that use them
  uint64_t hosts_number = 0;       ///< of the reducer that connected them
  bool hosts_missing = false;      ///< all ranks do without, as the log says
  std::mutex mutex;
  std::weak_ptr<PlainStep> running;  ///< of the plain backward that runs

  /// Begins anew where the members are others: one that has joined has counted nothing.
  void follow(const std::string& now) {
    if (!configuration.empty() && configuration != now) {
      turns = 0;
      agreeing_ms = 0;
      is_dead = nullptr;
      hosts.reset();
      hosts_missing = false;
      aborting.forget();
    }
    configuration = now;
  }
  /// They were connected for this reducer.
  void note_hosts(const std::shared_ptr<HostGroup>& connected, uint64_t number) {
    hosts = connected;
    hosts_number = number;
  }
  /// True the first time.
  bool note_missing_hosts() { return !std::exchange(hosts_missing, true); }
  bool knows_dead(int world_size) const {
    for (int rank = 0; is_dead && rank < world_size; ++rank) {
      if (is_dead(rank)) {
        return true;
      }
    }
    return false;
  }
};
std::shared_ptr<GroupTraffic> traffic_of(const c10d::ProcessGroup* group);

/// The reducers of this process, by their loops. From any thread.
void own(const std::shared_ptr<LoopDriver>& loop, const std::vector<at::Tensor>& parameters,
         const c10d::ProcessGroup* group);
void disown(const LoopDriver* loop);
/// Those that have one of these parameters.
std::vector<std::shared_ptr<LoopDriver>> owners_of(const std::vector<at::Tensor>& parameters);
/// Those, and the others of the group, oldest first.
std::vector<std::shared_ptr<LoopDriver>> reducers_beside(const std::vector<at::Tensor>& parameters,
                                                         const c10d::ProcessGroup* group);

}  // namespace brimful
