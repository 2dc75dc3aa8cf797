#include "sizer/length_law.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <set>

namespace brimful {
namespace {
constexpr size_t kLeastLengths = 4;  // three for a parabola, one to check it
constexpr double kReach = 2;         // a longer one may take another way through a library
constexpr double kToleranceBytes = 64;
constexpr double kPagesBytes = 2 * 4096;
constexpr double kRounding = 0.02;     // of an allocation: more is no rounding
constexpr double kMoreRounding = 1.5;  // than at the known lengths
constexpr double kUncertain = 0.02;    // of the peak: what may be added to it
constexpr double kUncertainBytes = 131072;

using Weights = std::array<double, 3>;

/// The trace of one length, all with the same rows.
struct Known {
  double length = 0;
  const memory::Trace* trace = nullptr;

  double bytes(size_t event) const { return static_cast<double>(std::abs((*trace)[event])); }
};

bool is_same_sequence(const Known& one, const Known& other) {
  return std::equal(one.trace->begin(), one.trace->end(), other.trace->begin(), other.trace->end(),
                    [](int64_t a, int64_t b) { return (a < 0) == (b < 0); });
}

/// Lengths with one sequence of allocations, around one that is wanted.
struct Run {
  std::vector<Known> known;
  Known below;  ///< the neighbours of the wanted length, or twice the same one
  Known above;
};

std::optional<Run> run_around(const std::vector<Known>& known, double length) {
  if (known.size() < kLeastLengths || length > kReach * known.back().length ||
      kReach * length < known.front().length) {
    return std::nullopt;
  }
  const auto found =
      std::lower_bound(known.begin(), known.end(), length,
                       [](const Known& one, double value) { return one.length < value; });
  const auto above = found == known.end() ? found - 1 : found;
  const auto below = found == known.begin() || above->length == length ? above : found - 1;
  const auto is_other = [&](const Known& one) { return !is_same_sequence(one, *above); };
  if (is_other(*below)) {
    return std::nullopt;
  }
  const auto first = std::find_if(std::make_reverse_iterator(below), known.rend(), is_other).base();
  const auto end = std::find_if(above, known.end(), is_other);
  if (static_cast<size_t>(end - first) < kLeastLengths) {
    return std::nullopt;
  }
  return Run{{first, end}, *below, *above};
}

/// What an allocation takes by the law, and the most that it may take.
struct Range {
  double expected = 0;
  double most = 0;
};

class Allocations {
 public:
  Allocations(Run run, double length) : run_(std::move(run)), length_(length) {
    const auto& known = run_.known;
    const double middle = (known.front().length + known.back().length) / 2;
    const auto inner =
        std::min_element(known.begin() + 1, known.end() - 1, [&](const auto& a, const auto& b) {
          return std::abs(a.length - middle) < std::abs(b.length - middle);
        });
    nodes_ = {&known.front(), &*inner, &known.back()};
    at_length_ = weights_at(length);
    for (const auto& one : known) {
      at_known_.push_back(weights_at(one.length));
    }
  }

  size_t size() const { return run_.above.trace->size(); }
  int64_t sign(size_t event) const { return (*run_.above.trace)[event] < 0 ? -1 : 1; }

  Range bytes(size_t event) const {
    double off = 0;
    double largest = 0;
    for (size_t k = 0; k < at_known_.size(); ++k) {
      const double real = run_.known[k].bytes(event);
      largest = std::max(largest, real);
      off = std::max(off, std::abs(value(at_known_[k], event) - real));
    }
    if (off > std::max(kPagesBytes, kRounding * largest)) {
      return beside(event);
    }
    const bool rounded = off > kToleranceBytes;
    double margin = rounded ? std::max(kPagesBytes, kMoreRounding * off) : off;
    margin *= std::abs(at_length_[0]) + std::abs(at_length_[1]) + std::abs(at_length_[2]);
    const double expected = value(at_length_, event);
    return {expected, expected + margin};
  }

 private:
  /// Of the parabola through the nodes.
  Weights weights_at(double length) const {
    Weights weights;
    for (size_t i = 0; i < weights.size(); ++i) {
      const double own = nodes_[i]->length;
      const double one = nodes_[(i + 1) % 3]->length;
      const double other = nodes_[(i + 2) % 3]->length;
      weights[i] = (length - one) * (length - other) / (own - one) / (own - other);
    }
    return weights;
  }

  double value(const Weights& weights, size_t event) const {
    double sum = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      sum += weights[i] * nodes_[i]->bytes(event);
    }
    return sum;
  }

  /// Off the parabola.
  Range beside(size_t event) const {
    const double below = run_.below.bytes(event);
    const double above = run_.above.bytes(event);
    const double ratio = length_ / run_.above.length;
    if (ratio > 1) {
      return {above, above * ratio * ratio + kPagesBytes};
    }
    if (length_ < run_.below.length) {
      return {0, below + kPagesBytes};
    }
    return {std::min(below, above), std::max(below, above) + kPagesBytes};
  }

  Run run_;
  double length_;
  std::array<const Known*, 3> nodes_;
  Weights at_length_;
  std::vector<Weights> at_known_;
};

enum class Certainty : uint8_t { enough, not_known, uncertain };

Certainty trace_at(const std::vector<Known>& known, double length, memory::Trace& most) {
  auto run = run_around(known, length);
  if (!run) {
    return Certainty::not_known;
  }
  const Allocations allocations(std::move(*run), length);
  memory::Trace expected;
  for (size_t event = 0; event < allocations.size(); ++event) {
    const auto range = allocations.bytes(event);
    const auto whole = [&](double bytes) {
      return allocations.sign(event) * std::max<int64_t>(std::llround(bytes), 1);
    };
    expected.push_back(whole(range.expected));
    most.push_back(whole(range.most));
  }
  const auto peak = static_cast<double>(memory::peak_bytes(expected));
  const auto more = static_cast<double>(memory::peak_bytes(most)) - peak;
  return more > std::max(kUncertainBytes, kUncertain * peak) ? Certainty::uncertain
                                                             : Certainty::enough;
}
}  // namespace

std::optional<std::vector<TracedRows>> traces_at(const std::vector<TracedLength>& known,
                                                 double length) {
  std::set<int64_t> rows;
  for (const auto& one : known) {
    for (const auto& traced : one.traces) {
      rows.insert(traced.rows);
    }
  }
  std::vector<TracedRows> expected;
  for (const auto count : rows) {
    std::vector<Known> with;
    for (const auto& one : known) {
      for (const auto& traced : one.traces) {
        if (traced.rows == count) {
          with.push_back({one.length, &traced.trace});
        }
      }
    }
    TracedRows traced{count, {}};
    const auto how = trace_at(with, length, traced.trace);
    if (how == Certainty::uncertain) {
      return std::nullopt;
    }
    if (how == Certainty::enough) {
      expected.push_back(std::move(traced));
    }
  }
  return expected.size() < 2 ? std::nullopt : std::optional(std::move(expected));
}

}  // namespace brimful
