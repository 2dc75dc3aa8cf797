#include "launch/share_rule.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <span>
#include <utility>

#include "launch/recent.h"

namespace brimful::launch {
namespace {

constexpr double kGain = 0.05;
constexpr double kSlowestPace = 0.125;  // a power of two, so that products with it are exact

int64_t sum(const std::vector<int64_t>& rows) {
  return std::accumulate(rows.begin(), rows.end(), int64_t{0});
}

/// Hands out rows that are left over, or takes back (`left` below 0), one by one: where one row more costs least, and where
/// one row less gains most; the lowest of ranks that are alike.
void settle_rest(std::vector<int64_t>& shares, int64_t left, const std::vector<double>& weights,
                 const ShareBounds& bounds) {
  const int64_t by = left > 0 ? 1 : -1;
  using Candidate =
      std::pair<double, size_t>;  // the least first, in a heap: there may be thousands
  std::vector<Candidate> candidates;
  const auto candidate = [&](size_t i) {
    const auto rows = static_cast<double>(by > 0 ? shares[i] + 1 : shares[i]);
    return Candidate(by > 0 ? rows / weights[i] : -(rows / weights[i]), i);
  };
  const auto may_change = [&](size_t i) {
    return by > 0 ? shares[i] < bounds.most[i] : shares[i] > bounds.least[i];
  };
  for (size_t i = 0; i < shares.size(); ++i) {
    if (may_change(i)) {
      candidates.push_back(candidate(i));
    }
  }
  std::make_heap(candidates.begin(), candidates.end(), std::greater<>());
  for (; left != 0; left -= by) {
    TORCH_INTERNAL_ASSERT(!candidates.empty(), "the bounds do not allow this sum");
    std::pop_heap(candidates.begin(), candidates.end(), std::greater<>());
    const size_t i = candidates.back().second;
    candidates.pop_back();
    shares[i] += by;
    if (may_change(i)) {
      candidates.push_back(candidate(i));
      std::push_heap(candidates.begin(), candidates.end(), std::greater<>());
    }
  }
}

double median_of(const std::deque<double>& values) {
  std::vector<double> copy(values.begin(), values.end());
  return median(std::span(copy));
}

bool is_known(int64_t rows, double ms) {
  return rows > 0 && std::isfinite(ms) && ms > 0;
}

void keep_last(auto& values, size_t count) {
  while (values.size() > count) {
    values.pop_front();
  }
}

void see(ShareHistory& history, const std::vector<int64_t>& rows,
         const std::vector<double>& work_ms) {
  std::vector<double> speeds(rows.size());
  double slowest_ms = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (is_known(rows[i], work_ms[i])) {
      speeds[i] = static_cast<double>(rows[i]) / work_ms[i];
      slowest_ms = std::max(slowest_ms, work_ms[i]);
    }
  }
  history.speeds.push_back(std::move(speeds));
  history.slowest_ms.push_back(slowest_ms);
  keep_last(history.speeds, kRecent);
  keep_last(history.slowest_ms, kFewest);
}

/// Rows per ms; 0: not known.
double speed_of(const ShareHistory& history, size_t rank) {
  return recent_median(history.speeds.size(),
                       [&](size_t step) { return history.speeds[step].at(rank); });
}

/// Those of the ranks whose speed is known; the others keep what they have.
struct Known {
  std::vector<size_t> ranks;
  std::vector<double> speeds;
  std::vector<int64_t> shares;
  ShareBounds bounds;
};

Known known_of(const ShareHistory& history, const ShareBounds& bounds) {
  Known known;
  for (size_t rank = 0; rank < history.shares.size(); ++rank) {
    if (const double speed = speed_of(history, rank); speed > 0) {
      known.ranks.push_back(rank);
      known.speeds.push_back(speed);
      known.shares.push_back(history.shares[rank]);
      known.bounds.least.push_back(bounds.least[rank]);
      known.bounds.most.push_back(bounds.most[rank]);
    }
  }
  return known;
}

double slowest_ms(const std::vector<int64_t>& shares, const std::vector<double>& speeds) {
  double slowest = 0;
  for (size_t i = 0; i < shares.size(); ++i) {
    slowest = std::max(slowest, static_cast<double>(shares[i]) / speeds[i]);
  }
  return slowest;
}

/// A change that made steps slower says that time is not in proportion to rows: the next goes half as far.
void judge_last_change(ShareHistory& history) {
  if (history.before_ms > 0) {
    const double now_ms = median_of(history.slowest_ms);
    history.pace = now_ms > history.before_ms ? std::max(history.pace / 2, kSlowestPace)
                                              : std::min(history.pace * 2, 1.0);
    history.before_ms = 0;
  }
}

}  // namespace

std::vector<int64_t> allot(const std::vector<double>& weights, int64_t rows,
                           const ShareBounds& bounds) {
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> shares;
  for (size_t i = 0; i < weights.size(); ++i) {
    const double quota = static_cast<double>(rows) * weights[i] / total;
    shares.push_back(
        std::clamp(static_cast<int64_t>(quota), bounds.least[i], bounds.most[i]));  // rounds down
  }
  if (const int64_t left = rows - sum(shares); left != 0) {
    settle_rest(shares, left, weights, bounds);
  }
  return shares;
}

void note_step(ShareHistory& history, const std::vector<int64_t>& rows,
               const std::vector<double>& work_ms, int64_t lag, const ShareBounds& bounds) {
  see(history, rows, work_ms);
  history.unseen = std::max<int64_t>(history.unseen - 1, 0);
  if (history.unseen == 0) {
    judge_last_change(history);
  }
  const auto known = known_of(history, bounds);
  if (known.ranks.size() < 2) {
    return;
  }
  const double now_ms = slowest_ms(known.shares, known.speeds);
  const double speed = std::accumulate(known.speeds.begin(), known.speeds.end(), 0.0);
  if (static_cast<double>(sum(known.shares)) / speed > now_ms * (1 - kGain)) {
    return;  // nor could rows that can be divided at will gain that much
  }
  const auto best = allot(known.speeds, sum(known.shares), known.bounds);
  if (slowest_ms(best, known.speeds) > now_ms * (1 - kGain)) {
    return;
  }
  std::vector<double> towards;
  for (size_t i = 0; i < best.size(); ++i) {
    const auto change = static_cast<double>(best[i] - known.shares[i]);
    towards.push_back(static_cast<double>(known.shares[i]) + history.pace * change);  // exact
  }
  const auto next = allot(towards, sum(known.shares), known.bounds);
  if (next == known.shares) {
    return;
  }
  for (size_t i = 0; i < next.size(); ++i) {
    history.shares[known.ranks[i]] = next[i];
  }
  history.before_ms = median_of(history.slowest_ms);
  history.unseen = lag + static_cast<int64_t>(kFewest) - 1;
}

}  // namespace brimful::launch
