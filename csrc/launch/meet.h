#pragma once
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <exception>
#include <string>

namespace brimful::launch {

/// Returns when every rank of the group has come here without an error, else raises on every rank: one that came with
/// an error rethrows it, the others throw RankFailed or RankOutOfMemory with the words of the lowest such rank, or
/// RankFailed with the names of those that did not come within the group's timeout. `what` says in the message what
/// was to be done. Through the group's store; a null group is a group of one.
void meet(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& what,
          const std::exception_ptr& error);

}  // namespace brimful::launch
