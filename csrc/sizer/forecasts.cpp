#include "sizer/forecasts.h"
#include "sizer/length_law.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <numeric>

namespace brimful {
namespace {
constexpr size_t kKept = 64;

/// The direction from one kind's sizes to another's, in least steps; empty for other forms and equal sizes.
std::vector<int64_t> direction_of(const RowKind& from, const RowKind& to) {
  if (from.form != to.form || from.sizes.size() != to.sizes.size() || from.sizes == to.sizes) {
    return {};
  }
  std::vector<int64_t> steps(from.sizes.size());
  std::transform(to.sizes.begin(), to.sizes.end(), from.sizes.begin(), steps.begin(),
                 std::minus<>());
  int64_t divisor = 0;
  for (const auto step : steps) {
    divisor = std::gcd(divisor, step);
  }
  const auto first = std::find_if(steps.begin(), steps.end(), [](auto step) { return step != 0; });
  divisor = *first < 0 ? -divisor : divisor;
  for (auto& step : steps) {
    step /= divisor;
  }
  return steps;
}

/// Where the length stands: of the sizes that vary along a line, the one that varies most.
size_t length_index(const std::vector<int64_t>& direction) {
  return static_cast<size_t>(
      std::max_element(direction.begin(), direction.end(),
                       [](auto a, auto b) { return std::abs(a) < std::abs(b); }) -
      direction.begin());
}
}  // namespace

SharedForecast Rehearsal::forecast() const {
  if (first.size() < 2) {
    return nullptr;
  }
  auto one = PeakModel::fit(first);
  auto two = PeakModel::fit(second);
  return one && two ? std::make_shared<const Forecast>(Forecast{std::move(*one), std::move(*two)})
                    : nullptr;
}

Forecasts::Entries::iterator Forecasts::find_in(Entries& entries, const RowKind& kind) {
  const auto found = std::find_if(entries.begin(), entries.end(),
                                  [&](const auto& entry) { return entry.kind == kind; });
  if (found != entries.end()) {
    entries.splice(entries.begin(), entries, found);
  }
  return found;
}

void Forecasts::keep_in(Entries& entries, Entry entry) {
  entries.push_front(std::move(entry));
  if (entries.size() > kKept) {
    entries.pop_back();
  }
}

std::optional<SharedForecast> Forecasts::find(const RowKind& kind) {
  for (auto* const entries : {&rehearsed_, &derived_}) {
    if (const auto found = find_in(*entries, kind); found != entries->end()) {
      return found->forecast;
    }
  }
  if (find_in(distrusted_, kind) != distrusted_.end()) {
    return std::nullopt;
  }
  auto forecast = derive(kind);
  if (!forecast) {
    return std::nullopt;
  }
  keep_in(derived_, {kind, {}, forecast});
  return forecast;
}

SharedForecast Forecasts::keep(const RowKind& kind, Rehearsal rehearsal) {
  auto forecast = rehearsal.forecast();
  keep_in(rehearsed_, {kind, std::move(rehearsal), forecast});
  std::erase_if(derived_, [&](const auto& entry) { return entry.kind.form == kind.form; });
  return forecast;
}

void Forecasts::distrust(const RowKind& kind) {
  const auto derived = find_in(derived_, kind);
  if (derived != derived_.end()) {
    derived_.erase(derived);
    keep_in(distrusted_, {kind, {}, nullptr});
  }
}

SharedForecast Forecasts::derive(const RowKind& kind) {
  std::map<std::vector<int64_t>, std::vector<Entries::iterator>> lines;
  for (auto entry = rehearsed_.begin(); entry != rehearsed_.end(); ++entry) {
    if (auto direction = direction_of(entry->kind, kind); entry->forecast && !direction.empty()) {
      lines[std::move(direction)].push_back(entry);
    }
  }
  const auto best = std::max_element(lines.begin(), lines.end(), [](const auto& a, const auto& b) {
    return a.second.size() < b.second.size();
  });
  if (best == lines.end()) {
    return nullptr;
  }
  auto& line = best->second;
  const auto index = length_index(best->first);
  std::sort(line.begin(), line.end(), [&](const auto& a, const auto& b) {
    return a->kind.sizes[index] < b->kind.sizes[index];
  });
  const auto derived_by = [&](std::vector<TracedRows> Rehearsal::*piece) {
    std::vector<TracedLength> known;
    known.reserve(line.size());
    for (const auto& entry : line) {
      known.push_back({static_cast<double>(entry->kind.sizes[index]), entry->rehearsal.*piece});
    }
    return traces_at(known, static_cast<double>(kind.sizes[index]));
  };
  auto first = derived_by(&Rehearsal::first);
  auto second = derived_by(&Rehearsal::second);
  if (!first || !second) {
    return nullptr;
  }
  for (const auto& entry : line) {
    rehearsed_.splice(rehearsed_.begin(), rehearsed_, entry);  // what laws rest on stays
  }
  return Rehearsal{std::move(*first), std::move(*second)}.forecast();
}

}  // namespace brimful
