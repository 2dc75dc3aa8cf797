#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "reducer/group_link.h"

namespace brimful {

enum class TurnKind : uint64_t { plain, managed, close, exchange, failed };

/// What a rank says in a turn.
struct Turn {
  TurnKind kind = TurnKind::plain;
  uint64_t number = 0;  ///< of the reducer, among the group's
  uint64_t detail = 0;  ///< managed: of the step's other reducers; failed: the Status
  uint64_t others = 0;  ///< reducers of the group beside this one
};

/// Agreements of several reducers of one group. What they send would match whatever another rank sends at the same time: a
/// bucket of another model would be summed with this one's, or end the process (gloo). So before the first bucket of a
/// step the ranks agree, in a small all_gather, which model it is of, and in a plain loop, before the last ones, that
/// backward has ended; a rank whose step died says so in the place of either. A lone reducer does none of it.
struct Turns {
  GroupLink& link;
  bool opened = false;            ///< the ranks have agreed to be in this step
  bool closed = false;            ///< and to be at the end of its backward
  bool ended = false;             ///< they did not: nothing more is launched
  std::vector<Turn> said;         ///< by rank: what it said then
  int64_t number = 0;             ///< when
  double agreeing_before_ms = 0;  ///< the group's agreeing_ms when the step began

  explicit Turns(GroupLink& of) : link(of) {}
  /// One agreement; where it fails, the group is broken, or this turn has ended.
  void agree(const Turn& own);
  /// This rank's step died: says so where the ranks agree next.
  Exchange part(FailureKind kind);
  /// On the board, of a step that died where several reducers take turns.
  static std::string place_of(int64_t number, int rank);
  /// They end together.
  void share_end_of(const Turns& other);
  void reset() { opened = closed = ended = false; }
  void begin_times() { agreeing_before_ms = link.traffic->agreeing_ms; }
  double agreeing_ms() const { return link.traffic->agreeing_ms - agreeing_before_ms; }
};

}  // namespace brimful
