#include "probes/oom_blocks.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace brimful::probes {
namespace {

using memory::LiveBlock;
using memory::Phase;

constexpr size_t kSites = 12;
constexpr GrowthOptions kGrowthBeforeOom{.steps = 3, .warm_up = 1};

std::string place_of(uint32_t site) {
  return memory::to_string(memory::site(site));
}

}  // namespace

void read_blocks(OomFacts& facts, const std::vector<LiveBlock>& blocks) {
  std::map<std::pair<uint32_t, Phase>, OomSite> sites;
  for (const LiveBlock& block : blocks) {
    OomSite& site = sites[{block.site, block.phase}];
    site.phase = block.phase;
    site.bytes += block.bytes;
    ++site.blocks;
    facts.tracked_bytes += block.bytes;
    if (block.phase == Phase::backward) {
      (block.step < facts.step ? facts.kept_gradient_bytes : facts.step_gradient_bytes) +=
          block.bytes;
    }
  }
  if (facts.fragmentation && facts.fragmentation->splitter) {
    auto& splitter = *facts.fragmentation->splitter;
    const auto block = std::ranges::find(blocks, splitter.block.data, &LiveBlock::data);
    splitter.place = block == blocks.end() ? "" : place_of(block->site);
  }
  std::vector<std::pair<uint32_t, OomSite>> sorted;
  for (const auto& [key, site] : sites) {
    sorted.emplace_back(key.first, site);
  }
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.second.bytes > b.second.bytes; });
  sorted.resize(std::min(sorted.size(), kSites));
  for (auto& [id, site] : sorted) {
    site.place = place_of(id);
    facts.sites.push_back(std::move(site));
  }
  for (const Growth& growth : growing(blocks, facts.step, kGrowthBeforeOom)) {
    facts.growing.push_back({place_of(growth.site), growth.steps, growth.bytes});
  }
  facts.growing.resize(std::min(facts.growing.size(), kSites));
  facts.earlier_forward = facts.step >= 2;
}

}  // namespace brimful::probes
