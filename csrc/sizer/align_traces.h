#pragma once
#include <brimful/export.h>
#include "sizer/peak_model.h"

#include <vector>

namespace brimful {

/// Makes traces of different sizes one sequence: where a size allocates what another one does not (a buffer for each
/// thread from some number of rows on), the other gets 0 bytes. Two events are the same if both are allocations, or both
/// frees, and the larger size's has between as many bytes and in proportion to the rows. As few zeros as possible (the
/// shortest edit script: Myers, "An O(ND) difference algorithm", Algorithmica 1, 1986, section 4).
/// `traces`: by increasing rows, none with a 0. False if they differ in more than a tenth of their events, or in 1000; they may then
/// be partly aligned.
BRIMFUL_API bool align(std::vector<TracedRows>& traces);

/// What a loop over rows or heads takes and gives back in every round becomes one round: events that follow each other in
/// equal blocks, each of which sums to 0. The peak stays the same.
BRIMFUL_API void collapse_rounds(memory::Trace& trace);

}  // namespace brimful
