#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "reducer/agree.h"
#include "step/failure_board.h"

namespace brimful {

/// A group of the ranks for tensors on the CPU, which nothing else uses: a participant whose collectives are another's agrees
/// over it. Not thread-safe.
class SideGroup {
 public:
  /// `name`: of whose group it is, for keys in its store.
  SideGroup(Group group, const std::string& name);

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  const FailureBoard& board() const { return *board_; }
  /// Attempts that have ended, for texts of errors; those of an exchange name it.
  int64_t step() const { return step_; }
  void next_step() { ++step_; }

  /// Every rank's bytes, by rank; all ranks give the same number. `what`: they agree on.
  /// @throws RankFailed if the group broke
  std::vector<std::vector<uint8_t>> exchange(const std::vector<uint8_t>& own,
                                             const std::string& what) const;
  /// As Participant::gather and Participant::sum have it.
  std::vector<at::Tensor> gather(const at::Tensor& own) const;
  void sum(at::Tensor& tensor) const;
  /// Aborts it; what fails there, the log says.
  void abandon() const;
  /// Before the interpreter ends.
  void release() { group_.reset(); }

 private:
  template <typename Collective>
  auto call(const std::string& could_not, const Collective& collective) const;

  Group group_;
  int rank_;
  int world_size_;
  int64_t step_ = 0;
  std::optional<FailureBoard> board_;
};

}  // namespace brimful
