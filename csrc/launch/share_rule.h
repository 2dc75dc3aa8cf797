#pragma once
#include <cstdint>
#include <deque>
#include <vector>

// How many rows of a step each rank takes, as functions of plain data: the same on all ranks and
// hosts. So there is no sum with a product in it, which some compilers round once and some twice,
// and nothing of <cmath> that rounds.
namespace brimful::launch {

struct ShareBounds {
  std::vector<int64_t> least;  ///< by rank
  std::vector<int64_t> most;   ///< by rank
};

/// `rows` in proportion to the weights, which are positive, within bounds that allow that sum. Rows that rounding
/// leaves over go where they cost least.
std::vector<int64_t> allot(const std::vector<double>& weights, int64_t rows,
                           const ShareBounds& bounds);

/// What a rule has seen, and its last decision.
struct ShareHistory {
  std::vector<int64_t> shares;             ///< decided last, by rank
  std::deque<std::vector<double>> speeds;  ///< of the last steps: rows per ms by rank, 0: not known
  std::deque<double> slowest_ms;           ///< of the last steps
  int64_t unseen = 0;    ///< steps until the last change has been seen, and is judged
  double pace = 1;       ///< how far a change goes of what the speeds say
  double before_ms = 0;  ///< slowest rank before the last change; 0: judged
};

/// Notes a step and decides shares anew. They change only where the slowest rank is then predicted to
/// need at least 5 % less time. A decision is for the step that is `lag` behind the one noted.
void note_step(ShareHistory& history, const std::vector<int64_t>& rows,
               const std::vector<double>& work_ms, int64_t lag, const ShareBounds& bounds);

}  // namespace brimful::launch
