#include "probes/leak/copied_growth.h"

#include <algorithm>
#include <utility>

namespace brimful::probes {
namespace {

/// So many growths are followed.
constexpr int kFollowed = 2;
/// Of what there was, so much is copied at least: a history may lose a row and gain two.
constexpr double kWhole = 0.75;

}  // namespace

CopiedSites::FreshBySite CopiedSites::fresh_blocks(const std::vector<memory::LiveBlock>& blocks,
                                                   int64_t done) const {
  FreshBySite found;
  for (const auto& block : blocks) {
    if (block.step <= done) {
      auto& newest = found[block.site].step;
      newest = std::max(newest, block.step);
    }
  }
  for (const auto& block : blocks) {
    const auto at = found.find(block.site);
    if (at == found.end() || block.step > done) {
      continue;
    }
    auto& fresh = at->second;
    if (block.step == fresh.step) {
      fresh.blocks.push_back(block);
      fresh.bytes += block.bytes;
    } else if (const auto run = runs_.find(block.site);
               run != runs_.end() && block.step == run->second.step) {
      fresh.bytes_before += block.bytes;
    }
  }
  return found;
}

/// One more growth, unless its interval is twice as long as another: then a run begins.
void CopiedSites::grow(Run& run, bool follows, bool copied) {
  const auto gap = run.growths == 0 ? 1 : looks_ - run.grown;
  const auto least = run.growths < 2 ? gap : std::min(run.least, gap);
  const auto most = run.growths < 2 ? gap : std::max(run.most, gap);
  if (most >= 2 * least) {
    run.first_bytes = run.bytes;
    run.growths = 0;
    run.least = run.most = gap;
  } else {
    run.least = least;
    run.most = most;
  }
  run.grown = looks_;
  ++run.growths;
  if (follows && copied) {
    ++run.copies;
  } else if (follows) {
    constexpr int kLongest = 16;
    constexpr int64_t kRest = 8;
    run.copies = 0;
    run.failures = std::min(run.failures + 1, kLongest);
    run.rests_until = looks_ + (kRest << run.failures);
  }
}

void CopiedSites::advance(Run& run, const Fresh& fresh, double copied) {
  const auto traced = std::exchange(run.traced_bytes, -1);
  if (fresh.step == run.step) {
    return;
  }
  const auto kept = static_cast<double>(fresh.bytes_before);
  const bool replaced = run.step >= 0 && kept <= (1 - kWhole) * static_cast<double>(run.bytes);
  if (replaced && fresh.bytes > run.bytes) {
    grow(run, traced >= 0, copied >= kWhole * traced);
  } else if (!replaced || fresh.bytes < run.bytes) {
    run.growths = 0;
    run.copies = 0;
    run.first_bytes = fresh.bytes;
  }
  run.step = fresh.step;
  run.bytes = fresh.bytes;
}

void CopiedSites::rest() {
  trace_.end();
  for (auto& [site, run] : runs_) {
    run.traced_bytes = -1;
  }
}

void CopiedSites::follow(const FreshBySite& fresh, const GrowthOptions& options,
                         const Wants& wants) {
  std::vector<memory::LiveBlock> sources;
  for (const auto& [site, now] : fresh) {
    auto& run = runs_.at(site);
    const bool may_decide = run.growths >= std::max<int64_t>(options.steps - kFollowed, 1) &&
                            run.rests_until <= looks_ &&
                            looks_ - run.grown < 2 * run.most;  // it may be over
    if (may_decide && wants(site, run.growths + 1)) {
      run.traced_bytes = static_cast<double>(now.bytes);
      sources.insert(sources.end(), now.blocks.begin(), now.blocks.end());
    }
  }
  if (!sources.empty() && !trace_.begin(sources)) {
    rest();
  }
}

std::vector<CopiedGrowth> CopiedSites::look(const std::vector<memory::LiveBlock>& blocks,
                                            int64_t done, const GrowthOptions& options,
                                            const Wants& wants) {
  ++looks_;
  std::map<uint32_t, std::map<const void*, double>> copied;
  for (const auto& part : trace_.end()) {
    copied[part.from][part.data] += part.bytes;
  }
  const auto fresh = fresh_blocks(blocks, done);
  std::erase_if(runs_, [&](const auto& entry) { return !fresh.contains(entry.first); });
  std::vector<CopiedGrowth> found;
  for (const auto& [site, now] : fresh) {
    if (now.step < options.warm_up) {
      runs_.try_emplace(site);
      continue;
    }
    auto& run = runs_[site];
    CopiedGrowth here{.growth = {.site = site}, .blocks = {}};
    double all = 0;
    for (const auto& block : now.blocks) {
      const auto from = copied[site].find(block.data);
      const auto bytes = from == copied[site].end() ? 0 : from->second;
      here.blocks.push_back({block.data, block.bytes, bytes});
      all += bytes;
    }
    advance(run, now, all);
    if (run.growths < options.steps || run.copies < kFollowed || looks_ - run.grown >= run.most) {
      continue;
    }
    here.growth.first_step = now.step;
    here.growth.steps = run.growths;
    here.growth.all_steps = run.growths;
    here.growth.period = run.most;
    here.growth.blocks = static_cast<int64_t>(now.blocks.size());
    here.growth.bytes = now.bytes - run.first_bytes;
    found.push_back(std::move(here));
  }
  follow(fresh, options, wants);
  return found;
}

}  // namespace brimful::probes
