#pragma once
#include <cstdint>
#include <map>
#include <vector>

#include "ladder/step_events.h"
#include "memory/caching_model.h"

namespace brimful::ladder {

/// What a plan holds from moment to moment of its step.
class PlanTimeline {
 public:
  /// A block of a forward that runs again.
  struct Again {
    int64_t bytes = 0;
    int64_t taken_at = 0;            ///< moments of its first run
    int64_t given_back_at = kNever;  ///< kNever: by its end
    bool is_kept = false;            ///< beyond its end, until `kept_until`
    int64_t kept_until = kNever;
  };

  /// `lists`: requests() will be asked for.
  PlanTimeline(int64_t moments, bool lists);

  void hold(int64_t bytes, int64_t from, int64_t to);
  /// All of it at one moment, and `beside_bytes` meanwhile.
  void run_again(int64_t moment, int64_t beside_bytes, const std::vector<Again>& blocks);

  int64_t peak_bytes() const;
  /// The same as what an allocator is asked for, in order.
  std::vector<memory::CachingRequest> requests(uint64_t stream) const;

 private:
  struct Event {
    int64_t moment = 0;
    int64_t order = 0;  ///< within the moment
    int64_t bytes = 0;  ///< 0: given back
    uint64_t block = 0;
  };
  size_t place(int64_t moment) const;
  void change(int64_t bytes, int64_t from, int64_t to);
  void list(int64_t bytes, int64_t from, int64_t order, int64_t to, int64_t order_of_end);

  std::vector<int64_t> changes_;
  std::map<int64_t, int64_t> rises_;  ///< beyond what is held, and gone behind the moment
  bool lists_;
  std::vector<Event> events_;
  uint64_t blocks_ = 0;
};

}  // namespace brimful::ladder
