#pragma once
#include <brimful/step/control_record.h>

#include <string>
#include <vector>

namespace brimful {

/// Takes weights and losses out of the records of ranks whose rows another rank has, too, so that sums over the records count
/// them once. `rows_of`: by rank, the lowest rank with the same rows; empty: each rank has its own. Returns which ranks
/// differ in what should be the same rows; empty if none do.
std::string count_once(std::vector<ControlRecord>& records, const std::vector<int>& rows_of);

}  // namespace brimful
