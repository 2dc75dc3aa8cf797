#pragma once
#include <brimful/export.h>
#include <c10/core/Device.h>
#include "step/piece_history.h"
#include "step/rungs.h"

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace brimful {

/// How an attempt at a unit of work is run.
struct ExecutionPlan {
  int64_t pieces = 1;
  int64_t piece_rows = 0;  ///< of the largest piece
  Rungs rungs = {};

  /// Pieces as even as can be.
  static ExecutionPlan in_pieces(int64_t rows, int64_t pieces);
};

/// The plans of work of one kind, from what fitted and what ran out of memory. A unit of work begins with what worked last
/// time, or with a larger plan where that is known to fit; what failed is tried again when there is more room, or after a
/// number of units that doubles (PieceHistory). Plain data; not thread-safe.
class BRIMFUL_API RetryPolicy {
 public:
  using Bytes = std::vector<std::pair<c10::Device, int64_t>>;

  /// `devices`: that work takes memory of, as far as it is counted. `piece_rows`: that fit; 0: memory has not run out.
  explicit RetryPolicy(const std::vector<c10::Device>& devices, int64_t piece_rows = 0,
                       PieceHistory::Law law = PieceHistory::Law::convex);

  int64_t piece_rows() const { return piece_rows_; }
  void set_piece_rows(int64_t rows) { piece_rows_ = rows; }

  /// What is in use now is not the work's.
  void measure();
  /// One more unit of work stands.
  void end_unit() { ++units_; }
  PieceHistory::Room room(c10::Device device) const;

  /// Giving torch's cache back waits for the device, which finer pieces do not: not in every unit.
  bool may_release() const;
  void note_release() { released_in_ = units_; }

  /// As many as worked last time; `pieces` where memory has not run out.
  int64_t known_pieces(int64_t rows, int64_t pieces) const;
  ExecutionPlan first(int64_t rows, int64_t pieces) const;
  /// After the last of `failures` attempts: smaller by what is known of `device`, and so that one row is reached with the
  /// last retry.
  ExecutionPlan next(int64_t rows, const ExecutionPlan& failed, int64_t failures,
                     int64_t max_retries, c10::Device device) const;

  void note_failure(const ExecutionPlan& failed, c10::Device device);
  /// `peaks`: of the devices in a unit of work that stood at once. `raises`: the next one may begin so.
  void note_fit(const ExecutionPlan& plan, const Bytes& peaks, bool raises = true);

 private:
  struct Seen {
    c10::Device device;
    int64_t used_before = 0;
    PieceHistory history;
  };
  const Seen* find(c10::Device device) const;

  int64_t piece_rows_;
  int64_t units_ = 0;
  std::optional<int64_t> released_in_;  ///< the last unit that gave the cache back
  std::vector<Seen> seen_;
};

}  // namespace brimful
