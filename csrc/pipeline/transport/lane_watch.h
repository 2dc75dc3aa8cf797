#pragma once
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "pipeline/transport/device_lane.h"
#include "step/failure_board.h"

namespace brimful::pipeline {

/// Looks after the lanes of a rank while a call is under way. Its hosts wait for its device in many places (a stage that
/// copies, the loss, what is undone) and for other ranks' verdicts, which do not learn there that a rank died
/// or hangs. So a thread asks the lanes. Where one will not deliver it gives up all of them: the device waits no more, what it computes may have
/// any values, and the ranks' verdict says so. Other ranks, whose devices wait for this one, learn of it through the store.
class LaneWatch {
 public:
  explicit LaneWatch(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  /// These from now on, which outlive it or are set no more before they go. `prefix`: of the store's keys, the same on all ranks.
  void set(std::vector<DeviceLane*> lanes, const std::string& prefix);
  /// The thread: looks until it is gone.
  std::jthread look_after();
  /// What is under way so far is of steps that stand.
  void keep();
  /// Gives up all lanes, and forgets them.
  void drop() noexcept;
  /// Why they were given up; empty: they were not, as a look says.
  std::string given_up();
  /// Waits on the host until what is under way has arrived.
  /// @throws RankFailed if it will not
  void await_arrival();
  /// What an earlier step, which stands, had under way did not arrive.
  bool has_lost_kept() const { return lost_kept_; }

 private:
  void look();
  void look_here();
  bool another_gave_up();
  void post();
  void abort() noexcept;

  c10::intrusive_ptr<c10d::Store> store_;
  std::mutex mutex_;
  std::vector<DeviceLane*> lanes_;
  std::optional<FailureBoard> board_;  ///< of the lanes
  std::string given_up_;
  std::atomic<bool> lost_kept_{false};
};

}  // namespace brimful::pipeline
