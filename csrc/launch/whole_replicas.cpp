#include "launch/whole_replicas.h"

#include <map>
#include <optional>

namespace brimful::launch {
namespace {
/// Those of a replica that were found so far, by their ranks.
struct Found {
  std::vector<std::optional<Member>> ranks;
  int count = 0;
};
}  // namespace

std::vector<Member> replica_at(const std::vector<Member>& list, size_t place, int pipeline_size) {
  const auto begin =
      list.begin() + static_cast<std::ptrdiff_t>(place) / pipeline_size * pipeline_size;
  return {begin, begin + pipeline_size};
}

std::vector<Member> whole_replicas(const std::vector<Member>& before,
                                   const std::vector<Member>& came, int pipeline_size) {
  std::vector<Member> all;
  for (size_t place = 0; place < before.size(); place += pipeline_size) {
    const auto ranks = replica_at(before, place, pipeline_size);
    if (std::all_of(ranks.begin(), ranks.end(),
                    [&](const Member& each) { return has(came, each.id); })) {
      all.insert(all.end(), ranks.begin(), ranks.end());
    }
  }
  std::map<std::string, Found> found;
  for (const auto& each : came) {
    if (has(before, each.id)) {
      continue;
    }
    auto& replica = found[each.replica];
    replica.ranks.resize(pipeline_size);
    auto& rank = replica.ranks.at(each.pipeline_rank);
    replica.count += rank ? 0 : 1;
    rank = rank ? rank : each;
    if (replica.count == pipeline_size) {
      for (const auto& member : replica.ranks) {
        all.push_back(*member);
      }
      replica = {};
    }
  }
  return all;
}

}  // namespace brimful::launch
