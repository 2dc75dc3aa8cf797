#pragma once
#include <brimful/export.h>
#include <brimful/sizer/row_kind.h>
#include "sizer/peak_model.h"

#include <list>
#include <memory>
#include <optional>
#include <vector>

namespace brimful {

/// What forward and backward of a piece take.
struct Forecast {
  PeakModel first;   ///< of the first piece of a step, or the only one
  PeakModel second;  ///< of two: gradients are there already in the second
};
using SharedForecast = std::shared_ptr<const Forecast>;  ///< null: memory follows no law

/// What was traced with batches of one kind, by rows, ascending.
struct Rehearsal {
  std::vector<TracedRows> first;
  std::vector<TracedRows> second;    ///< both pieces
  std::optional<int64_t> fits = {};  ///< rows; memory ran out before there were traces enough

  SharedForecast forecast() const;
};

/// The kinds that were rehearsed, and those that follow from them: kinds of one form whose sizes lie on a line, as those
/// of one varying length do. The 64 that were needed last are kept. Not thread-safe.
class BRIMFUL_API Forecasts {
 public:
  /// Nothing: batches of this kind must be rehearsed.
  std::optional<SharedForecast> find(const RowKind& kind);
  /// Returns the forecast of what was rehearsed.
  SharedForecast keep(const RowKind& kind, Rehearsal rehearsal);
  /// A forecast that was too small is not given again: the next batch of its kind is rehearsed.
  void distrust(const RowKind& kind);

  size_t rehearsed() const { return rehearsed_.size(); }

 private:
  struct Entry {
    RowKind kind;
    Rehearsal rehearsal;  ///< empty for what is known, or to be rehearsed
    SharedForecast forecast;
  };
  using Entries = std::list<Entry>;
  static Entries::iterator find_in(Entries& entries, const RowKind& kind);
  static void keep_in(Entries& entries, Entry entry);
  SharedForecast derive(const RowKind& kind);

  Entries rehearsed_;  ///< the last needed first
  Entries derived_;
  Entries distrusted_;
};

}  // namespace brimful
