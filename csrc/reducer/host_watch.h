#pragma once
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <string>

#include "reducer/host_group.h"

namespace brimful {

/// Whoever leaves as it should says so in the store; `lost`, which does not throw, is called where a connection has ended and
/// nobody has. A host may leave at its program's end, while others still wait. `prefix`: of keys, the same on all ranks.
HostGroup::Watch watch_by(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix,
                          int rank, int world_size, std::function<void()> lost);

}  // namespace brimful
