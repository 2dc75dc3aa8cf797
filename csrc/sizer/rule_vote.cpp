#include <brimful/sizer/rule_vote.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <map>

#include "base/format.h"

namespace brimful {
namespace {
constexpr uint64_t kEvery = (uint64_t{1} << 48) - 1;

struct Found {
  uint64_t agreeing = kEvery;
  std::vector<int> ranks;  ///< that know
};
}  // namespace

bool is_voted(const std::vector<ControlRecord>& records) {
  return std::any_of(records.begin(), records.end(), [](const auto& of) { return of.plan != 0; });
}

// In fields that an exchange before a step leaves free: whole numbers, which a double keeps.
void RuleVote::put(ControlRecord& record) const {
  record.ref = kind;
  record.plan = knows ? 1 : 0;
  record.loss_sum = static_cast<double>(agreeing & kEvery);
}

void RuleVote::settle(const std::vector<ControlRecord>& records) {
  std::map<uint32_t, Found> by_kind;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const auto& record = records[rank];
    if (record.ref != 0 && record.plan != 0) {
      auto& found = by_kind[record.ref];
      found.agreeing &= static_cast<uint64_t>(record.loss_sum);
      found.ranks.push_back(static_cast<int>(rank));
    }
  }
  for (const auto& [_, found] : by_kind) {
    TORCH_CHECK_VALUE(
        found.agreeing != 0,
        "the ranks see the loss of their batches composed by different rules (ranks: ",
        format_list(found.ranks), "); say by loss_rule how it is, on all of them");
  }
  if (const auto found = by_kind.find(kind); kind != 0 && found != by_kind.end()) {
    agreeing = found->second.agreeing & (knows ? agreeing : kEvery);
    knows = true;
  }
  chosen = knows && agreeing != 0 ? std::countr_zero(agreeing) : -1;
}

}  // namespace brimful
