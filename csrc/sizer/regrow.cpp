// What the sizer learns from its steps about the rows that fit.
#include <brimful/memory/stats.h>
#include <brimful/sizer/pieces.h>

#include <algorithm>
#include "sizer/batch_sizer_state.h"

namespace brimful {

PieceHistory::Room BatchSizer::State::room() const {
  const auto capacity = memory::capacity_bytes(options_.device);
  return capacity ? PieceHistory::Room(*capacity - learned_.used_before) : std::nullopt;
}

void BatchSizer::State::note_peak(const StepInput& input, const Outcome& outcome) {
  if (outcome.retries > 0 || outcome.split.empty()) {
    return;  // the peak is that of what was repeated, too
  }
  const auto most = largest_piece(outcome.split);
  learned_.history.note(most, outcome.pieces, outcome.peak_bytes - learned_.used_before, room());
  if (learned_.piece_rows > 0 && !input.split) {
    learned_.piece_rows = std::max(learned_.piece_rows, most);
  }
}

}  // namespace brimful
