#pragma once
#include <brimful/export.h>

#include <cstdint>
#include <map>
#include <optional>

namespace brimful {

/// What steps in pieces of several sizes were seen to take, and the number of pieces that follows from it. Plain data; not
/// thread-safe.
class BRIMFUL_API PieceHistory {
 public:
  /// Bytes that a step may take over what is in use before it; nothing where there is no limit.
  using Room = std::optional<int64_t>;
  /// Of a peak in the rows of a piece; it is not below 0 at none. What is known is never too small: between two seen sizes
  /// the chord (convex) or the larger one's (concave), and the proportion behind the largest one.
  enum class Law : uint8_t { convex, concave };
  explicit PieceHistory(Law law = Law::convex) : law_(law) {}

  /// A step whose largest of `pieces` pieces had `piece_rows` rows took `bytes` over what was in use before it.
  void note(int64_t piece_rows, int64_t pieces, int64_t bytes, Room room = {});
  /// Memory ran out in such a step. Where its estimated need had room, and took half of it or more, and such pieces were
  /// not seen to fit in as much, an allocator cannot use all of the room: for 4096 steps no more than that share of it
  /// counts, less a twentieth. Else pieces of that size are tried again when there is more room (by a twentieth), or after
  /// a number of steps that doubles with each failure.
  void note_failure(int64_t piece_rows, int64_t pieces, Room room, int64_t step);

  /// The fewest pieces, `pieces` at most, that are known to fit.
  int64_t coarser(int64_t rows, int64_t pieces, Room room, int64_t step) const;
  /// As many as are known to fit: coarser(), or finer ones where `pieces` are known not to fit in this room, such as
  /// beside gradients of an earlier batch. Nothing has to run out for that.
  int64_t fitting(int64_t rows, int64_t pieces, Room room, int64_t step) const;
  /// The number of pieces to try after `pieces` ran out of memory: what fits by a margin where their need is known (up
  /// to four times as many, of two rows at least), else twice as many; at most one row each.
  int64_t finer(int64_t rows, int64_t pieces, Room room) const;

 private:
  struct Peak {
    int64_t bytes = 0;
    Room in;  ///< the least room in which it fitted
  };
  using Peaks = std::map<int64_t, Peak>;  ///< by rows of the largest piece
  struct RanOut {
    int64_t piece_rows = 0;
    Room room;
    int64_t until_step = 0;
  };
  struct Usable {
    double share = 1;  ///< of the room
    int64_t until_step = 0;
  };
  std::optional<int64_t> upper_bound_of(const Peaks& peaks, int64_t rows) const;
  std::optional<int64_t> need(int64_t piece_rows, int64_t pieces) const;
  bool is_blocked(int64_t piece_rows, Room room, int64_t step) const;
  bool has_fitted(int64_t piece_rows, int64_t pieces, Room room) const;
  bool is_known_to_fit(int64_t piece_rows, int64_t pieces, Room room, int64_t step) const;
  bool is_known_too_large(int64_t piece_rows, int64_t pieces, Room room, int64_t step) const;
  double usable_share(int64_t step) const;
  Room usable(Room room, int64_t step) const;

  Law law_;
  Peaks whole_;    ///< of steps in one piece
  Peaks several_;  ///< gradients are there already in the second piece
  std::optional<RanOut> ran_out_;
  std::optional<Usable> usable_;  ///< less than all, as a failure below an estimate has shown
  int64_t wait_steps_ = 0;
};

}  // namespace brimful
