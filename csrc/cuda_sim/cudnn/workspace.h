#pragma once
#include <cstdint>
#include <string>

namespace sim {

/// The bytes of workspace that this device takes for an operation at this many rows: those of the recorded steps, on a
/// line between the recorded rows and beyond them. An operation that no step had takes none. Where the number is not
/// recorded and SIM_CUDA_UNKNOWN says so, it is the least that can be, or the most: `bound` at these rows.
int64_t workspace_for(const std::string& operation, int64_t rows, int64_t bound);

}  // namespace sim
