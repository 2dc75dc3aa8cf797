#include "step/piece_history.h"
#include <brimful/step/pieces.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace brimful {
namespace {
constexpr int64_t kFirstWait = 16;  // steps
constexpr int64_t kLongestWait = 4096;
constexpr double kShrinkTo = 0.85;    // of the room, where the need is taken to be in proportion
constexpr int64_t kMostAtOnce = 4;    // times as many pieces; else the shortage is passing
constexpr double kMoreRoom = 1.05;    // than there was when memory ran out
constexpr double kLeastUsable = 0.5;  // of the room; below it, something else has taken it
constexpr int64_t kLeastRows = 2;     // BatchNorm refuses one row
constexpr size_t kSizesKept = 1024;   // batches of many sizes
constexpr int64_t kEstimateSlackBytes = 16384;  // of an estimate: losses, weights, alignment

int64_t bytes_in(PieceHistory::Room room) {
  return room.value_or(std::numeric_limits<int64_t>::max());
}

/// What a batch more or less holds makes no other room: loaders have one less at the end of their data.
bool is_much_more(PieceHistory::Room room, PieceHistory::Room than) {
  return than && static_cast<double>(bytes_in(room)) >
                     kMoreRoom * static_cast<double>(std::max<int64_t>(*than, 0));
}

}  // namespace

std::optional<int64_t> PieceHistory::upper_bound_of(const Peaks& peaks, int64_t rows) const {
  const auto above = peaks.lower_bound(rows);
  if (above != peaks.end() && (above->first == rows || law_ == Law::concave)) {
    return above->second.bytes;
  }
  if (above == peaks.begin()) {
    return above == peaks.end() ? std::nullopt : std::optional(above->second.bytes);
  }
  const auto below = std::prev(above);
  const auto share = static_cast<double>(rows - below->first);
  const auto low = static_cast<double>(below->second.bytes);
  const double per_row = above == peaks.end()
                             ? low / static_cast<double>(below->first)
                             : (static_cast<double>(above->second.bytes) - low) /
                                   static_cast<double>(above->first - below->first);
  return static_cast<int64_t>(std::ceil(low + per_row * share)) + kEstimateSlackBytes;
}

void PieceHistory::note(int64_t piece_rows, int64_t pieces, int64_t bytes, Room room) {
  if (piece_rows <= 0) {
    return;
  }
  if (ran_out_ && piece_rows >= ran_out_->piece_rows && !is_much_more(room, ran_out_->room)) {
    ran_out_.reset();  // it was a passing shortage
  }
  if (usable_ && room && static_cast<double>(bytes) > usable_->share * static_cast<double>(*room)) {
    usable_.reset();
  }
  auto& peaks = pieces == 1 ? whole_ : several_;
  if (peaks.size() >= kSizesKept) {
    peaks.clear();
  }
  const auto [place, is_new] = peaks.try_emplace(piece_rows, Peak{bytes, room});
  auto& peak = place->second;
  peak.bytes = std::max(peak.bytes, bytes);
  peak.in = bytes_in(room) < bytes_in(peak.in) ? room : peak.in;
}

bool PieceHistory::has_fitted(int64_t piece_rows, int64_t pieces, Room room) const {
  const auto& peaks = pieces == 1 ? whole_ : several_;
  return std::any_of(peaks.lower_bound(piece_rows), peaks.end(),
                     [&](const auto& peak) { return bytes_in(peak.second.in) <= bytes_in(room); });
}

double PieceHistory::usable_share(int64_t step) const {
  return usable_ && step < usable_->until_step ? usable_->share / kMoreRoom : 1;
}

void PieceHistory::note_failure(int64_t piece_rows, int64_t pieces, Room room, int64_t step) {
  const auto bytes = need(piece_rows, pieces);
  const double share = bytes && room ? static_cast<double>(*bytes) / static_cast<double>(*room) : 0;
  if (share >= kLeastUsable && share <= 1 && !has_fitted(piece_rows, pieces, room)) {
    usable_ = Usable{std::min(share, kMoreRoom * usable_share(step)), step + kLongestWait};
    return;
  }
  const bool again = is_blocked(piece_rows, room, std::numeric_limits<int64_t>::min());
  wait_steps_ = again ? std::min(2 * wait_steps_, kLongestWait) : kFirstWait;
  if (again) {  // that more rows fail too says nothing new of fewer
    ran_out_->room = bytes_in(ran_out_->room) < bytes_in(room) ? room : ran_out_->room;
    ran_out_->until_step = step + wait_steps_;
  } else {
    ran_out_ = RanOut{piece_rows, room, step + wait_steps_};
  }
}

bool PieceHistory::is_blocked(int64_t piece_rows, Room room, int64_t step) const {
  return ran_out_ && step < ran_out_->until_step && piece_rows >= ran_out_->piece_rows &&
         !is_much_more(room, ran_out_->room);
}

std::optional<int64_t> PieceHistory::need(int64_t piece_rows, int64_t pieces) const {
  const auto of_several = upper_bound_of(several_, piece_rows);
  if (pieces > 1) {
    return of_several;
  }
  const auto of_whole = upper_bound_of(whole_, piece_rows);
  return of_whole && of_several ? std::min(of_whole, of_several) : of_whole ? of_whole : of_several;
}

PieceHistory::Room PieceHistory::usable(Room room, int64_t step) const {
  return room ? Room(static_cast<int64_t>(usable_share(step) * static_cast<double>(*room)))
              : std::nullopt;
}

bool PieceHistory::is_known_to_fit(int64_t piece_rows, int64_t pieces, Room room,
                                   int64_t step) const {
  const auto bytes = need(piece_rows, pieces);
  const bool fits = has_fitted(piece_rows, pieces, room);
  return bytes && *bytes <= bytes_in(fits ? room : usable(room, step)) &&
         !is_blocked(piece_rows, room, step);
}

/// What fewer rows were seen to take is the least that more rows take.
bool PieceHistory::is_known_too_large(int64_t piece_rows, int64_t pieces, Room room,
                                      int64_t step) const {
  if (!room || has_fitted(piece_rows, pieces, room)) {
    return false;
  }
  const auto& peaks = pieces == 1 ? whole_ : several_;
  const auto end = peaks.upper_bound(piece_rows);
  const auto at_most = bytes_in(usable(room, step));
  return is_blocked(piece_rows, room, step) ||
         (end != peaks.begin() && std::any_of(peaks.begin(), end, [&](const auto& peak) {
            return peak.second.bytes > at_most;
          }));
}

int64_t PieceHistory::coarser(int64_t rows, int64_t pieces, Room room, int64_t step) const {
  for (int64_t fewer = 1; fewer < pieces; ++fewer) {
    if (is_known_to_fit(pieces_for(rows, fewer), fewer, room, step)) {
      return fewer;
    }
  }
  return pieces;
}

int64_t PieceHistory::fitting(int64_t rows, int64_t pieces, Room room, int64_t step) const {
  auto fits = coarser(rows, pieces, room, step);
  while (fits >= pieces && fits < rows &&
         is_known_too_large(pieces_for(rows, fits), fits, room, step)) {
    const auto next = finer(rows, fits, room);
    const auto known = [&](int64_t more) {
      return is_known_to_fit(pieces_for(rows, more), more, room, step);
    };
    for (++fits; fits < next && !known(fits); ++fits) {
    }
  }
  return fits;
}

int64_t PieceHistory::finer(int64_t rows, int64_t pieces, Room room) const {
  const auto piece_rows = pieces_for(rows, pieces);
  const auto& peaks = pieces == 1 ? whole_ : several_;
  const auto known = peaks.find(piece_rows);
  if (room && known != peaks.end() && known->second.bytes > *room && *room > 0) {
    const double share =
        kShrinkTo * static_cast<double>(*room) / static_cast<double>(known->second.bytes);
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
