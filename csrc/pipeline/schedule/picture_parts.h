#pragma once
#include <brimful/pipeline/simulate.h>

#include <string>

namespace brimful::pipeline {

/// A number with at most `digits` significant digits, whatever the locale.
std::string number_text(double value, int digits = 6);

/// "27.3 %"
std::string percent_text(double share);

/// "zb_h2: 4 ranks, 4 stages, 8 microbatches; time 27, period 24, bubble 11.1 %": the period where it differs.
std::string title_of(const Timeline& timeline);

/// Calls `see` with each compute action that takes time, and its rank.
template <typename See>
void for_each_cell(const Timeline& timeline, const See& see) {
  for (size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
    for (const auto& timed : timeline.ranks[rank]) {
      if (is_compute(timed.action.kind) && timed.end > timed.start) {
        see(static_cast<int>(rank), timed);
      }
    }
  }
}

}  // namespace brimful::pipeline
