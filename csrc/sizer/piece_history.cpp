#include <brimful/sizer/piece_history.h>
#include <brimful/sizer/pieces.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace brimful {
namespace {
constexpr int64_t kFirstWait = 16;  // steps
constexpr int64_t kLongestWait = 4096;
constexpr double kShrinkTo = 0.85;   // of the room, where the need is taken to be in proportion
constexpr int64_t kMostAtOnce = 4;   // times as many pieces; else the shortage is passing
constexpr double kMoreRoom = 1.05;   // than there was when memory ran out
constexpr int64_t kLeastRows = 2;    // BatchNorm refuses one row
constexpr size_t kSizesKept = 1024;  // batches of many sizes
constexpr int64_t kEstimateSlackBytes = 16384;  // of an estimate: losses, weights, alignment

int64_t bytes_of(PieceHistory::Room room) {
  return room.value_or(std::numeric_limits<int64_t>::max());
}

/// What a batch more or less holds makes no other room: loaders have one less at the end of their data.
bool is_much_more(PieceHistory::Room room, PieceHistory::Room than) {
  return than && static_cast<double>(bytes_of(room)) >
                     kMoreRoom * static_cast<double>(std::max<int64_t>(*than, 0));
}

std::optional<int64_t> upper_bound_of(const std::map<int64_t, int64_t>& peaks, int64_t rows) {
  const auto above = peaks.lower_bound(rows);
  if (above != peaks.end() && above->first == rows) {
    return above->second;
  }
  if (above == peaks.begin()) {
    return above == peaks.end() ? std::nullopt : std::optional(above->second);
  }
  const auto below = std::prev(above);
  const auto share = static_cast<double>(rows - below->first);
  const auto low = static_cast<double>(below->second);
  const double per_row = above == peaks.end()
                             ? low / static_cast<double>(below->first)
                             : (static_cast<double>(above->second) - low) /
                                   static_cast<double>(above->first - below->first);
  return static_cast<int64_t>(std::ceil(low + per_row * share)) + kEstimateSlackBytes;
}
}  // namespace

void PieceHistory::note(int64_t piece_rows, int64_t pieces, int64_t bytes) {
  if (piece_rows <= 0) {
    return;
  }
  if (failure_ && piece_rows >= failure_->piece_rows) {
    failure_.reset();  // it was a passing shortage
  }
  auto& peaks = pieces == 1 ? whole_ : several_;
  if (peaks.size() >= kSizesKept) {
    peaks.clear();
  }
  auto& peak = peaks[piece_rows];
  peak = std::max(peak, bytes);
}

void PieceHistory::note_failure(int64_t piece_rows, Room room, int64_t step) {
  const bool again = is_blocked(piece_rows, room, std::numeric_limits<int64_t>::min());
  wait_steps_ = again ? std::min(2 * wait_steps_, kLongestWait) : kFirstWait;
  if (again) {  // that more rows fail too says nothing new of fewer
    failure_->room = bytes_of(failure_->room) < bytes_of(room) ? room : failure_->room;
    failure_->until_step = step + wait_steps_;
  } else {
    failure_ = Failure{piece_rows, room, step + wait_steps_};
  }
}

bool PieceHistory::is_blocked(int64_t piece_rows, Room room, int64_t step) const {
  return failure_ && step < failure_->until_step && piece_rows >= failure_->piece_rows &&
         !is_much_more(room, failure_->room);
}

std::optional<int64_t> PieceHistory::need(int64_t piece_rows, int64_t pieces) const {
  const auto of_several = upper_bound_of(several_, piece_rows);
  if (pieces > 1) {
    return of_several;
  }
  const auto of_whole = upper_bound_of(whole_, piece_rows);
  return of_whole && of_several ? std::min(of_whole, of_several) : of_whole ? of_whole : of_several;
}

int64_t PieceHistory::coarser(int64_t rows, int64_t pieces, Room room, int64_t step) const {
  for (int64_t fewer = 1; fewer < pieces; ++fewer) {
    const auto piece_rows = pieces_for(rows, fewer);
    const auto bytes = need(piece_rows, fewer);
    if (bytes && *bytes <= bytes_of(room) && !is_blocked(piece_rows, room, step)) {
      return fewer;
    }
  }
  return pieces;
}

int64_t PieceHistory::finer(int64_t rows, int64_t pieces, Room room) const {
  const auto piece_rows = pieces_for(rows, pieces);
  const auto& peaks = pieces == 1 ? whole_ : several_;
  const auto known = peaks.find(piece_rows);
  if (room && known != peaks.end() && known->second > *room && *room > 0) {
    const double share =
        kShrinkTo * static_cast<double>(*room) / static_cast<double>(known->second);
    const auto fits = static_cast<int64_t>(share * static_cast<double>(piece_rows));
    const auto wanted = pieces_for(rows, std::max<int64_t>(fits, 1));
    const auto twice = brimful::finer(rows, pieces);
    if (wanted > pieces && wanted <= kMostAtOnce * pieces) {
      return std::min(wanted, std::max(twice, rows / kLeastRows));
    }
  }
  return brimful::finer(rows, pieces);
}

}  // namespace brimful
