#pragma once
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <string>

#include "reducer/host_group.h"

namespace brimful {

/// A rank that leaves as it should says so in the store; `lost`, which does not throw, is called if a connection has ended and
/// no other rank has said so. A host may leave at its program's end, while others still wait. `prefix`: of keys, the same on all ranks.
HostGroup::Watch watch_by(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix,
                          int rank, int world_size, std::function<void()> lost);

}  // namespace brimful
