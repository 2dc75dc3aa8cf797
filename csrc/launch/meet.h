#pragma once
#include <brimful/error.h>
#include <brimful/export.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <exception>
#include <string>

namespace brimful::launch {

/// Returns when every rank of the group has come here without an error, else raises on every rank: one that came with
/// an error rethrows it, the others throw RankFailed or RankOutOfMemory with the message of the lowest such rank, or
/// RankFailed with the names of those that did not come within the group's timeout. `what` says in the message what
/// was to be done. Through the group's store; a null group is a group of one.
void meet(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& what,
          const std::exception_ptr& error);

/// Informs the other ranks how this rank's attempt ended (ok, out_of_memory or error), and returns on all whether memory ran
/// out on any. A rank that failed says so and does not wait: its own error is what its caller raises. `text` is the error's.
/// @throws RankFailed on ranks that did not fail, with the message of the lowest that did, or the names of those that did
/// not come within the group's timeout. Otherwise as meet(), with meetings of its own.
BRIMFUL_API bool share_attempt(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                               const std::string& what, Status end, const std::string& text);

}  // namespace brimful::launch
