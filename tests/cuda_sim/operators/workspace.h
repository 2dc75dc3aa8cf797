#pragma once
#include <c10/core/Allocator.h>

#include <string>

namespace sim_operators {

/// Whether CUDA's kernel is a product of matrices, which torch lends a workspace.
bool takes_workspace(const std::string& operator_name);

/// A workspace of the size that torch has chosen, on the current device: gone with the call, as a temporary.
at::DataPtr workspace();

}  // namespace sim_operators
