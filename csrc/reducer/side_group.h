#pragma once
#include <ATen/core/Tensor.h>
#include <brimful/step/control_record.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reducer/agree.h"
#include "reducer/host_group.h"
#include "step/failure_board.h"

namespace brimful {

/// A group of the ranks for tensors on the CPU, which nothing else uses: a participant whose collectives are another's agrees
/// over it. Not thread-safe.
class SideGroup {
 public:
  /// `name`: of whose group it is, for keys in its store.
  SideGroup(Group group, const std::string& name);

  /// A collective: exchanges go over connections of their own from now on, of `bytes` each. `lost`, which does not throw, is
  /// called by a thread once another rank's has ended that did not leave as it should: it died, or has abandoned the group.
  void connect_hosts(int64_t bytes, std::function<void()> lost);

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  bool is_alone() const { return world_size_ == 1; }
  /// May be null.
  c10::intrusive_ptr<c10d::Store> store() const { return group_->getStore(); }
  /// A prefix of keys in the store, the same on all ranks, that nothing else has.
  std::string place(const std::string& name) const { return prefix_ + name; }
  /// For a message of another rank.
  std::chrono::milliseconds timeout() const;
  const FailureBoard& board() const { return *board_; }
  /// Attempts that have ended, for texts of errors; those of an exchange name it.
  int64_t step() const { return step_; }
  void next_step() { ++step_; }

  /// Every rank's bytes, by rank; all ranks give the same number. `what`: they agree on.
  /// @throws RankFailed if the group broke
  std::vector<std::vector<uint8_t>> exchange(const std::vector<uint8_t>& own,
                                             const std::string& what) const;
  /// The same of a record alone.
  std::vector<ControlRecord> exchange_record(const ControlRecord& own,
                                             const std::string& what) const;
  /// As Participant::gather and Participant::sum have it.
  std::vector<at::Tensor> gather(const at::Tensor& own) const;
  void sum(at::Tensor& tensor) const;
  /// Aborts it; what fails there, the log says.
  void abandon() const;
  /// Before the interpreter ends.
  void release() {
    hosts_.reset();
    group_.reset();
  }

 private:
  template <typename Collective>
  auto call(const std::string& could_not, const Collective& collective) const;

  Group group_;
  int rank_;
  int world_size_;
  int64_t step_ = 0;
  std::string prefix_;  ///< of keys in its store
  std::optional<FailureBoard> board_;
  std::unique_ptr<HostGroup> hosts_;
};

}  // namespace brimful
