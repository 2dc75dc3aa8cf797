#pragma once
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <optional>

#include "reducer/group_link.h"

namespace brimful {

/// Sums of steps that stand, which a device may not have made yet: a step ends when the hosts have met. What such a step gave
/// is not known if its sums fail.
class SumsUnderWay {
 public:
  explicit SumsUnderWay(GroupLink& link) : link_(link) {}

  /// `last`: the work that ends last of the step's.
  void add(int64_t step, c10::intrusive_ptr<c10d::Work> last);
  /// Looks at the oldest, and breaks the link if they have failed, or have not ended in time. Waits for nothing.
  void look();
  /// Waits until all have ended, or the link is broken.
  void wait();
  /// All have ended, as far as the process group knows.
  bool have_ended() const;
  std::optional<int64_t> oldest_step() const;
  /// The error of the group with the step whose update is not known, if there is one.
  std::exception_ptr named(std::exception_ptr error) const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Sums {
    int64_t step = 0;
    c10::intrusive_ptr<c10d::Work> last;
    Clock::time_point since;
  };
  void require_not_aborted() const;
  void break_link(std::exception_ptr error);

  GroupLink& link_;
  std::deque<Sums> sums_;  ///< oldest first
};

}  // namespace brimful
