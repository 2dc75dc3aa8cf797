// What the sizer learns from its steps about the rows that fit.
#include <brimful/memory/stats.h>
#include <brimful/sizer/batch_sizer.h>
#include <brimful/sizer/pieces.h>

#include <algorithm>

namespace brimful {

PieceHistory::Room BatchSizer::room() const {
  const auto capacity = memory::capacity_bytes(options_.device);
  return capacity ? PieceHistory::Room(*capacity - used_before_) : std::nullopt;
}

void BatchSizer::note_peak(const StepInput& input, const Outcome& outcome) {
  if (outcome.retries > 0 || outcome.split.empty()) {
    return;  // the peak is that of what was repeated, too
  }
  const auto most = largest_piece(outcome.split);
  history_.note(most, outcome.pieces, outcome.peak_bytes - used_before_, room());
  if (piece_rows_ > 0 && !input.split) {
    piece_rows_ = std::max(piece_rows_, most);
  }
}

}  // namespace brimful
