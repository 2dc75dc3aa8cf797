#pragma once
#include <brimful/export.h>

#include <vector>

#include "launch/member_list.h"

/// Which processes form the next group, where a pipeline's ranks go on together or not at all: plain data.
namespace brimful::launch {

/// The members of `before` whose replica has all its ranks among those who came, in their order, and behind them replicas of
/// new processes that are whole. Lists have a replica's ranks beside each other, in the order of its pipeline.
BRIMFUL_API std::vector<Member> whole_replicas(const std::vector<Member>& before,
                                               const std::vector<Member>& came, int pipeline_size);

/// The ranks of the replica that has this place in a list.
BRIMFUL_API std::vector<Member> replica_at(const std::vector<Member>& list, size_t place,
                                           int pipeline_size);

}  // namespace brimful::launch
