#pragma once
#include <brimful/memory/stats.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "reducer/group_link.h"

namespace brimful {

/// Which forwards of a wrapped module still have their backward before them.
class Forwards {
 public:
  /// `announced`: a backward of a forward that was not is this rank's own.
  Forwards(const GroupLink& link, bool announced) : link_(link), announced_(announced) {}

  /// `is_step`: its backward ends a step.
  void begin(bool is_step) { open_ = is_step; }
  void note_output(bool has_graph) { watched_ = watched_ || has_graph; }
  /// `has_backward`: one may follow that no StepGroup runs.
  void end(bool has_backward) {
    due_ = std::exchange(open_, false);
    ooms_before_ = ooms();
    const bool watched = std::exchange(watched_, false);
    if (has_backward) {
      passed_ = true;
      unseen_ += watched ? 0 : 1;
    }
  }
  /// Of the module. `through_output`: it came through an output that was seen, not around all of them.
  void begin_backward(bool through_output) {
    open_ = due_ = passed_ = false;
    unseen_ = through_output ? 0 : std::max<int64_t>(unseen_ - 1, 0);
    ooms_before_ = ooms();
  }
  /// The one that is open is no step.
  void close() { open_ = false; }
  /// The forward that waits has none: a failure has taken its place.
  void drop() { open_ = due_ = false; }
  void forget() {
    open_ = due_ = passed_ = false;
    unseen_ = 0;
  }

  /// One has begun and has not ended.
  bool is_open() const { return open_; }
  /// A backward that gradients reach, but no output that was seen, may be that of a forward.
  bool may_have_backward() const { return !announced_ || passed_ || unseen_ > 0; }
  /// A forward may go without a backward, but one that was followed by a refused allocation has lost it.
  bool lost_backward() const { return due_ && ran_out(); }
  /// An allocation was refused since the last forward ended, or its backward began.
  bool ran_out() const { return ooms() > ooms_before_; }

 private:
  int64_t ooms() const { return memory::stats(link_.device).ooms; }

  const GroupLink& link_;
  bool announced_;
  bool open_ = false;
  bool due_ = false;      ///< it has ended and no backward of the module has begun
  bool passed_ = false;   ///< as due_, also where that backward does not synchronise
  bool watched_ = false;  ///< an output of the forward that ends has a graph
  int64_t unseen_ = 0;    ///< without one since then: their outputs do not say that backward begins
  int64_t ooms_before_ = 0;
};

}  // namespace brimful
