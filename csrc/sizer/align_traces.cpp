#include "sizer/align_traces.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <utility>

namespace brimful {
namespace {
constexpr double kEventSlackBytes = 64;
constexpr double kSlack = 0.01;
constexpr double kMostEdits = 0.1;      // of a trace's events
constexpr int64_t kMostScript = 1000;   // its memory grows with the square
constexpr int64_t kLongestRound = 128;  // events

enum class Edit : uint8_t { both, only_first, only_second };

/// An event, as the largest of the sizes that have it has it.
struct Sample {
  double rows = 0;
  double bytes = 0;
};

bool is_same(const Sample& small, const Sample& large) {
  if ((small.bytes < 0) != (large.bytes < 0)) {
    return false;
  }
  const double least = std::abs(small.bytes);
  const double bytes = std::abs(large.bytes);
  const double most = least * large.rows / small.rows;
  return bytes >= least * (1 - kSlack) - kEventSlackBytes &&
         bytes <= most * (1 + kSlack) + kEventSlackBytes;
}

/// The furthest a path of so many edits comes on each diagonal k = x - y; one list an edit, for the way back.
using Reached = std::vector<std::vector<int64_t>>;

bool goes_down(const std::vector<int64_t>& before, int64_t edits, int64_t k) {
  const auto at = [&](int64_t diagonal) { return before[diagonal + edits]; };
  return k == -edits || (k != edits && at(k - 1) < at(k + 1));
}

/// The way back through `reached`, from both ends to both beginnings.
std::vector<Edit> way_of(const Reached& reached, int64_t x, int64_t y) {
  std::vector<Edit> way;
  for (auto edits = std::ssize(reached) - 1; edits > 0; --edits) {
    const auto& before = reached[edits - 1];
    const auto k = x - y;
    const bool down = goes_down(before, edits, k);
    const auto from = down ? before[k + 1 + edits] : before[k - 1 + edits] + 1;
    for (; x > from; --x, --y) {
      way.push_back(Edit::both);
    }
    way.push_back(down ? Edit::only_second : Edit::only_first);
    (down ? y : x) -= 1;
  }
  way.insert(way.end(), x, Edit::both);
  std::reverse(way.begin(), way.end());
  return way;
}

std::optional<std::vector<Edit>> shortest_script(const std::vector<Sample>& first,
                                                 const std::vector<Sample>& second) {
  const auto rows = std::ssize(first);
  const auto columns = std::ssize(second);
  const auto most = std::min(
      kMostScript, static_cast<int64_t>(kMostEdits * static_cast<double>(std::max(rows, columns))));
  Reached reached;
  for (int64_t edits = 0; edits <= most; ++edits) {
    // Two places more than diagonals, so that the next round may look beyond both ends.
    std::vector<int64_t> furthest(2 * edits + 3, -1);
    for (int64_t k = -edits; k <= edits; k += 2) {
      int64_t x = 0;
      if (edits > 0) {
        const auto& before = reached.back();
        x = goes_down(before, edits, k) ? before[k + 1 + edits] : before[k - 1 + edits] + 1;
      }
      auto y = x - k;
      while (x < rows && y < columns && is_same(first[x], second[y])) {
        ++x;
        ++y;
      }
      furthest[k + edits + 1] = x;
      if (x >= rows && y >= columns) {
        reached.push_back(std::move(furthest));
        return way_of(reached, rows, columns);
      }
    }
    reached.push_back(std::move(furthest));
  }
  return std::nullopt;
}

/// Makes one of each run of equal blocks of `length` events that sum to 0.
void collapse_blocks(memory::Trace& trace, int64_t length) {
  std::vector<int64_t> sums{0};
  for (const auto bytes : trace) {
    sums.push_back(sums.back() + bytes);
  }
  const auto size = std::ssize(trace);
  const auto is_round = [&](int64_t begin, int64_t of) {  // another one of the block at `of`
    return begin + length <= size &&
           std::equal(trace.begin() + of, trace.begin() + of + length, trace.begin() + begin);
  };
  memory::Trace kept;
  for (int64_t at = 0; at < size;) {
    auto next = at + length;
    if (next > size || sums[at] != sums[next] || !is_round(next, at)) {
      kept.push_back(trace[at++]);
      continue;
    }
    while (is_round(next, at)) {
      next += length;
    }
    kept.insert(kept.end(), trace.begin() + at, trace.begin() + at + length);
    at = next;
  }
  trace = std::move(kept);
}
}  // namespace

void collapse_rounds(memory::Trace& trace) {
  size_t before = 0;
  do {  // rounds of the inner loops first, then those around them
    before = trace.size();
    for (int64_t length = 2; length <= kLongestRound; ++length) {
      collapse_blocks(trace, length);
    }
  } while (trace.size() < before);
}

bool align(std::vector<TracedRows>& traces) {
  const auto sample_of = [](const TracedRows& traced, size_t event) {
    return Sample{static_cast<double>(traced.rows), static_cast<double>(traced.trace[event])};
  };
  std::vector<Sample> common;
  common.reserve(traces.front().trace.size());
  for (size_t event = 0; event < traces.front().trace.size(); ++event) {
    common.push_back(sample_of(traces.front(), event));
  }
  for (size_t next = 1; next < traces.size(); ++next) {
    auto& traced = traces[next];
    std::vector<Sample> samples;
    samples.reserve(traced.trace.size());
    for (size_t event = 0; event < traced.trace.size(); ++event) {
      samples.push_back(sample_of(traced, event));
    }
    const auto script = shortest_script(common, samples);
    if (!script) {
      return false;
    }
    for (size_t event = 0; event < script->size(); ++event) {
      const auto place = static_cast<int64_t>(event);
      if ((*script)[event] == Edit::only_first) {
        traced.trace.insert(traced.trace.begin() + place, 0);
        continue;
      }
      if ((*script)[event] == Edit::only_second) {
        common.insert(common.begin() + place, Sample{});
        for (size_t before = 0; before < next; ++before) {
          traces[before].trace.insert(traces[before].trace.begin() + place, 0);
        }
      }
      common[event] = sample_of(traced, event);
    }
  }
  return true;
}

}  // namespace brimful
