#include "ladder/plan_timeline.h"

#include <algorithm>
#include <limits>
#include <tuple>

namespace brimful::ladder {
namespace {
constexpr int64_t kBehindAll = std::numeric_limits<int64_t>::max();
}  // namespace

PlanTimeline::PlanTimeline(int64_t moments, bool lists)
    : changes_(static_cast<size_t>(moments) + 1), lists_(lists) {}

size_t PlanTimeline::place(int64_t moment) const {
  return moment == kNever ? changes_.size() - 1 : static_cast<size_t>(moment);
}

void PlanTimeline::change(int64_t bytes, int64_t from, int64_t to) {
  changes_[place(from)] += bytes;
  changes_[place(to)] -= bytes;
}

void PlanTimeline::list(int64_t bytes, int64_t from, int64_t order, int64_t to,
                        int64_t order_of_end) {
  if (!lists_ || bytes == 0) {
    return;
  }
  events_.push_back({from, order, bytes, ++blocks_});
  if (to != kNever) {
    events_.push_back({to, order_of_end, 0, blocks_});
  }
}

void PlanTimeline::hold(int64_t bytes, int64_t from, int64_t to) {
  change(bytes, from, to);
  list(bytes, from, kBehindAll, to, -1);
}

void PlanTimeline::run_again(int64_t moment, int64_t beside_bytes,
                             const std::vector<Again>& blocks) {
  std::map<int64_t, int64_t> changes;
  list(beside_bytes, moment, 0, moment, kBehindAll - 1);
  for (const auto& block : blocks) {
    changes[block.taken_at] += block.bytes;
    if (block.is_kept) {
      change(block.bytes, moment, block.kept_until);
      list(block.bytes, moment, block.taken_at + 1, block.kept_until, -1);
      continue;
    }
    const bool by_end = block.given_back_at == kNever;
    if (!by_end) {
      changes[block.given_back_at] -= block.bytes;
    }
    list(block.bytes, moment, block.taken_at + 1, moment,
         by_end ? kBehindAll - 1 : block.given_back_at + 1);
  }
  int64_t used = beside_bytes;
  auto& most = rises_[moment];
  most = std::max(most, used);
  for (const auto& [at, bytes] : changes) {
    used += bytes;
    most = std::max(most, used);
  }
}

int64_t PlanTimeline::peak_bytes() const {
  int64_t used = 0;
  int64_t peak = 0;
  auto rise = rises_.begin();
  for (size_t moment = 0; moment < changes_.size(); ++moment) {
    for (; rise != rises_.end() && rise->first <= static_cast<int64_t>(moment); ++rise) {
      peak = std::max(peak, used + rise->second);
    }
    used += changes_[moment];
    peak = std::max(peak, used);
  }
  return peak;
}

std::vector<memory::CachingRequest> PlanTimeline::requests(uint64_t stream) const {
  auto events = events_;
  std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    return std::tie(a.moment, a.order) < std::tie(b.moment, b.order);
  });
  std::vector<memory::CachingRequest> requests;
  requests.reserve(events.size());
  for (const auto& event : events) {
    using Kind = memory::CachingRequest::Kind;
    requests.push_back(
        {event.bytes > 0 ? Kind::take : Kind::give_back, event.block, event.bytes, stream});
  }
  return requests;
}

}  // namespace brimful::ladder
