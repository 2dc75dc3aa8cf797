#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

// How rows that cost unlike are cut among ranks, as functions of plain data: the same on all ranks and hosts, by the
// discipline of share_rule.h. A row of n costs n + n * n / crossover.
namespace brimful::launch {

/// Of a rank's rows.
struct Load {
  double linear = 0;     ///< the sum of what rows cost
  double quadratic = 0;  ///< that of the squares
};

/// A crossover is one of these numbers, four to an octave: the cost at which the square is as much as the cost itself.
double crossover_at(int64_t place);
/// The largest one that is looked at where no row costs more than `most`: the squares are then next to nothing.
int64_t linear_place(int64_t most);

double cost_of(const Load& load, double crossover);

/// Places of the costs, which are at least 0 and at most `most`, by falling cost; of equal ones by place.
std::vector<size_t> by_falling_cost(std::span<const int64_t> costs, int64_t most);

/// Ranks in the order in which they take rows.
struct Takers {
  std::vector<double> slowness;  ///< time for each unit of cost
  std::vector<int64_t> most;     ///< rows
  int64_t least = 0;             ///< rows of each
};

/// Cuts rows into ranges, one for each taker, such that the slowest is as fast as ranges allow, to 1/512 of what work
/// that is perfectly divisible would take. `before` has what the rows before each cost, and all in the end; they come in
/// falling order. Returns where each range ends. The bounds allow that many rows.
std::vector<size_t> cut_by_cost(std::span<const double> before, const Takers& takers);

/// What was seen of steps, and what follows from it.
struct CostHistory {
  std::vector<double> slowness;         ///< by rank; 0: not known
  int64_t place = 0;                    ///< of the crossover
  int64_t stride = 0;                   ///< of its last move, with its sign
  std::deque<std::vector<Load>> loads;  ///< of the last steps, by rank
  std::deque<std::vector<double>> ms;   ///< of the same steps, by rank; 0: not known
};

/// Notes a step and decides anew. `most`: no row costs more.
void note_costs(CostHistory& history, std::vector<Load> loads, const std::vector<double>& work_ms,
                int64_t most);

/// By rank, of those that are not known the median of the others.
std::vector<double> known_slowness(const CostHistory& history);

}  // namespace brimful::launch
