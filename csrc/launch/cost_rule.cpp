#include "launch/cost_rule.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <iterator>
#include <numeric>
#include <optional>

#include "launch/recent.h"

namespace brimful::launch {
namespace {

constexpr int64_t kFarthest =
    64;  // the crossover is at most so many times the most that a row costs,
constexpr int64_t kOctaves = 12;  // and at least so many octaves less
constexpr int64_t kLongestStride = 4;
constexpr double kUnlike = 1.25;  // times as long are rows whose times are compared

/// The ends of ranges none of which takes longer; nothing where that is not possible. Who comes first takes as many rows as
/// it may: what is left for the others are fewer and cheaper rows.
std::optional<std::vector<size_t>> cut_within(std::span<const double> before, const Takers& takers,
                                              double longest) {
  const size_t rows = before.size() - 1;
  std::vector<size_t> ends;
  ends.reserve(takers.most.size());
  const auto least = static_cast<size_t>(takers.least);
  size_t kept = least * takers.most.size();  // rows for those behind
  size_t begin = 0;
  for (size_t i = 0; i < takers.most.size(); ++i) {
    kept -= least;
    const size_t last = std::min(begin + static_cast<size_t>(takers.most[i]), rows - kept);
    const double limit = before[begin] + longest / takers.slowness[i];
    const auto from = before.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto to = before.begin() + static_cast<std::ptrdiff_t>(last) + 1;
    const auto end = begin + static_cast<size_t>(std::upper_bound(from + 1, to, limit) - from) - 1;
    if (end < begin + least) {
      return std::nullopt;
    }
    ends.push_back(end);
    begin = end;
  }
  return begin == rows ? std::optional(std::move(ends)) : std::nullopt;
}

/// 0: not known.
double slowness_of(const CostHistory& history, size_t rank, double crossover) {
  return recent_median(history.ms.size(), [&](size_t step) {
    const double ms = history.ms[step][rank];
    return ms > 0 ? ms / cost_of(history.loads[step][rank], crossover) : 0;
  });
}

/// Two loads of a rank, the first of which took `times` as long: 1 where longer rows cost more than this crossover says, -1
/// where they cost less, and 0 where it does not show.
int compare(const Load& load, const Load& other, double times, double crossover) {
  if (load.linear == 0 || other.linear == 0) {
    return 0;
  }
  const double length = load.quadratic / load.linear;
  const double other_length = other.quadratic / other.linear;
  const bool longer = length / other_length > kUnlike;
  if (!longer && other_length / length <= kUnlike) {
    return 0;
  }
  const double expected = cost_of(load, crossover) / cost_of(other, crossover);
  return times == expected ? 0 : (times > expected) == longer ? 1 : -1;
}

/// How many comparisons of the last step with one before, each of one rank, say that longer rows cost more than this
/// crossover says, less those that say the contrary; and how many there are.
struct Votes {
  int64_t more = 0;
  int64_t all = 0;
};

/// `late`: a time is that of the step before, as on a device that runs behind its host.
Votes votes_of(const CostHistory& history, double crossover, size_t late) {
  Votes votes;
  const size_t last = history.ms.size() - 1;
  const size_t first = std::max(last >= kRecent ? last - kRecent + 1 : 0, late);
  for (size_t i = first; i < last; ++i) {
    for (size_t rank = 0; rank < history.slowness.size(); ++rank) {
      const double times = history.ms[last][rank] / history.ms[i][rank];
      if (!(times > 0) || !std::isfinite(times)) {
        continue;  // one of both is not known
      }
      const int more = compare(history.loads[last - late][rank], history.loads[i - late][rank],
                               times, crossover);
      votes.all += more == 0 ? 0 : 1;
      votes.more += more;
    }
  }
  return votes;
}

/// Moves the crossover where the votes are beyond two standard deviations of chance: farther while the direction stays.
void move_crossover(CostHistory& history, int64_t linear) {
  const double crossover = crossover_at(history.place);
  Votes votes = votes_of(history, crossover, 0);
  const Votes late = votes_of(history, crossover, 1);
  if (std::abs(late.more) > std::abs(votes.more)) {
    votes = late;
  }
  if (votes.more * votes.more <= 4 * votes.all) {
    return;
  }
  const int64_t sign = votes.more > 0 ? -1 : 1;  // more for squares: a smaller crossover
  const bool far = history.stride * sign > 0 && 4 * std::abs(votes.more) > 3 * votes.all;
  history.stride = far ? std::clamp(2 * history.stride, -kLongestStride, kLongestStride) : sign;
  const int64_t lowest = std::max<int64_t>(linear - 4 * kOctaves, 0);
  history.place = std::clamp(history.place + history.stride, lowest, linear);
}

}  // namespace

double crossover_at(int64_t place) {
  constexpr std::array<double, 4> kQuarters{1.0, 1.189207115002721, 1.4142135623730951,
                                            1.681792830507429};
  return std::ldexp(kQuarters[static_cast<size_t>(place % 4)],
                    static_cast<int>(place / 4));  // exact
}

int64_t linear_place(int64_t most) {
  return 4 * static_cast<int64_t>(std::bit_width(static_cast<uint64_t>(kFarthest * most)));
}

double cost_of(const Load& load, double crossover) {
  return load.linear +
         load.quadratic / crossover;  // a quotient, which no compiler fuses with a sum
}

std::vector<size_t> by_falling_cost(std::span<const int64_t> costs, int64_t most) {
  constexpr int kBits = 11;  // of a digit: a batch may have many thousands of rows
  constexpr uint64_t kDigits = uint64_t{1} << kBits;
  std::vector<size_t> places(costs.size());
  std::iota(places.begin(), places.end(), size_t{0});
  std::vector<size_t> sorted(costs.size());
  for (int shift = 0; (most >> shift) > 0; shift += kBits) {
    const auto digit = [&](size_t place) {
      return (static_cast<uint64_t>(most - costs[place]) >> shift) % kDigits;
    };
    std::array<size_t, kDigits + 1> begins{};
    for (const size_t place : places) {
      ++begins[digit(place) + 1];
    }
    std::partial_sum(begins.begin(), begins.end(), begins.begin());
    for (const size_t place : places) {
      sorted[begins[digit(place)]++] = place;
    }
    places.swap(sorted);
  }
  return places;
}

std::vector<size_t> cut_by_cost(std::span<const double> before, const Takers& takers) {
  double speed = 0;
  for (const double slowness : takers.slowness) {
    speed += 1 / slowness;
  }
  const double ideal = before.back() / speed;
  double gap = ideal / 512;
  double longest = ideal;
  auto best = cut_within(before, takers, longest);
  for (; !best; gap *= 2) {
    TORCH_INTERNAL_ASSERT(std::isfinite(longest), "the bounds do not allow so many rows");
    longest = ideal + gap;
    best = cut_within(before, takers, longest);
  }
  double below = gap / 8;
  while (below > ideal / 1024) {
    if (auto better = cut_within(before, takers, longest - below)) {
      best = std::move(better);
      longest -= below;
    }
    below /= 2;
  }
  return std::move(*best);
}

void note_costs(CostHistory& history, std::vector<Load> loads, const std::vector<double>& work_ms,
                int64_t most) {
  std::vector<double> ms(work_ms.size());
  for (size_t rank = 0; rank < ms.size(); ++rank) {
    const bool known = std::isfinite(work_ms[rank]) && work_ms[rank] > 0 && loads[rank].linear > 0;
    ms[rank] = known ? work_ms[rank] : 0;
  }
  history.loads.push_back(std::move(loads));
  history.ms.push_back(std::move(ms));
  if (history.ms.size() > kRecent + 1) {
    history.loads.pop_front();
    history.ms.pop_front();
  }
  move_crossover(history, linear_place(most));
  const double crossover = crossover_at(history.place);
  for (size_t rank = 0; rank < history.slowness.size(); ++rank) {
    if (const double slowness = slowness_of(history, rank, crossover); slowness > 0) {
      history.slowness[rank] = slowness;
    }
  }
}

std::vector<double> known_slowness(const CostHistory& history) {
  std::vector<double> known;
  std::copy_if(history.slowness.begin(), history.slowness.end(), std::back_inserter(known),
               [](double slowness) { return slowness > 0; });
  const double usual = known.empty() ? 1 : median(known);
  auto all = history.slowness;
  std::replace(all.begin(), all.end(), 0.0, usual);
  return all;
}

}  // namespace brimful::launch
