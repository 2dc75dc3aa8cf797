#include "probes/oom/blocks.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "probes/oom/attention_line.h"

namespace brimful::probes {
namespace {

using memory::LiveBlock;
using memory::Phase;

constexpr size_t kSites = 12;
constexpr GrowthOptions kGrowthBeforeOom{.steps = 3, .warm_up = 1};

std::string place_of(uint32_t site) {
  return memory::to_string(memory::site(site));
}

/// What the labels say of blocks. A gradient that is not its parameter's yet has its size.
class Known {
 public:
  explicit Known(const std::vector<memory::Label>& labels) {
    for (const memory::Label& label : labels) {
      categories_.emplace(label.data, label.category);
      if (label.category == memory::Category::parameters) {
        sizes_.insert(label.bytes);
        parameter_bytes += label.bytes;
      }
    }
  }

  bool has(const void* data) const { return categories_.contains(data); }
  bool is_gradient(const LiveBlock& block) const {
    const auto label = categories_.find(block.data);
    return label == categories_.end() ? is_of_parameter(block.bytes)
                                      : label->second == memory::Category::gradients;
  }
  /// CUDA's blocks are rounded up.
  bool is_of_parameter(int64_t bytes) const {
    constexpr int64_t kRounding = 511;
    const auto at_least = sizes_.lower_bound(bytes - kRounding);
    return at_least != sizes_.end() && *at_least <= bytes;
  }

  int64_t parameter_bytes = 0;

 private:
  std::unordered_map<const void*, memory::Category> categories_;
  std::set<int64_t> sizes_;
};

/// No more than the parameters' bytes are gradients of parameters: the rest only has their sizes.
void separate_gradients(OomFacts& facts, const std::vector<LiveBlock>& blocks, const Known& known) {
  int64_t own = 0;
  int64_t all = 0;
  for (const LiveBlock& block : blocks) {
    if (block.phase == Phase::backward && block.step >= facts.step) {
      all += block.bytes;
      own += known.is_gradient(block) ? block.bytes : 0;
    }
  }
  own = std::min(own, known.parameter_bytes);
  facts.step_gradient_bytes = own;
  facts.flow_bytes = all - own;
  facts.request_flows =
      facts.phase == Phase::backward && !(known.is_of_parameter(facts.request_bytes) &&
                                          own + facts.request_bytes <= known.parameter_bytes);
}

/// What lies in no model, no graph and no optimizer since the first step or before it.
void read_data(OomFacts& facts, const std::vector<LiveBlock>& blocks, const Known& known) {
  std::map<uint32_t, int64_t> sites;
  for (const LiveBlock& block : blocks) {
    if (block.phase == Phase::other && block.step == 0 && !known.has(block.data)) {
      sites[block.site] += block.bytes;
      facts.data_bytes += block.bytes;
    }
  }
  const auto most = std::ranges::max_element(
      sites, [](const auto& a, const auto& b) { return a.second < b.second; });
  facts.data_place = most == sites.end() ? "" : place_of(most->first);
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
  if (facts.program) {
    const Known known(facts.program->labels);
    separate_gradients(facts, blocks, known);
    read_data(facts, blocks, known);
  }
  std::vector<std::pair<uint32_t, OomSite>> sorted;
  sorted.reserve(sites.size());
  for (const auto& [key, site] : sites) {
    sorted.emplace_back(key.first, site);
  }
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.second.bytes > b.second.bytes; });
  const auto most =
      std::ranges::find(sorted, Phase::forward, [](const auto& site) { return site.second.phase; });
  facts.attention |= most != sorted.end() && is_attention(memory::site(most->first));
  sorted.resize(std::min(sorted.size(), kSites));
  for (auto& [id, site] : sorted) {
    site.place = place_of(id);
    facts.sites.push_back(std::move(site));
  }
  // What an optimizer adds by the step (LBFGS) is its state.
  auto kept = blocks;
  std::erase_if(kept, [](const LiveBlock& block) { return block.phase == Phase::optimizer; });
  for (const Growth& growth : growing(kept, facts.step, kGrowthBeforeOom)) {
    facts.growing.push_back({place_of(growth.site), growth.steps, growth.bytes});
  }
  facts.growing.resize(std::min(facts.growing.size(), kSites));
  facts.earlier_forward = facts.step >= 2;
}

}  // namespace brimful::probes
