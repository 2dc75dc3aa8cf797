#pragma once
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brimful {

/// Whoever waits in a collective of the group fails, on this rank and, over gloo, on the others at once; so does each later
/// one. What fails here, the log says. From any thread.
void break_group(c10d::ProcessGroup& group) noexcept;

}  // namespace brimful
