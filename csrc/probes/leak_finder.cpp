#include <brimful/log.h>
#include <brimful/probes/leak_finder.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <unordered_map>
#include <utility>

#include "memory/moment.h"
#include "memory/tracker.h"

namespace brimful::probes {
namespace {

using memory::LiveBlock;

// Of each step the largest block of the site: what holds it most likely holds the others.
std::vector<const LiveBlock*> samples_of(const Growth& growth,
                                         const std::vector<LiveBlock>& blocks) {
  std::map<int64_t, const LiveBlock*> by_step;
  for (const auto& block : blocks) {
    const bool grown = block.site == growth.site && block.step >= growth.first_step &&
                       block.step < growth.first_step + growth.steps;
    if (grown) {
      auto& sample = by_step[block.step];
      sample = sample == nullptr || block.bytes > sample->bytes ? &block : sample;
    }
  }
  std::vector<const LiveBlock*> samples;
  for (const auto& [step, block] : by_step) {
    samples.push_back(block);
  }
  return samples;
}

std::string key_of(const Holder& holder, uint32_t site) {
  if (holder.kind == HolderKind::unknown) {
    return "site " + std::to_string(site);
  }
  return holder.root + "\n" + holder.container;
}

// A search that fails is no reason to end the program's loop: then nothing is known of who holds.
template <typename Fn, typename... Given>
auto or_nothing(const Fn& fn, const Given&... given) -> decltype(fn(given...)) {
  try {
    return fn ? fn(given...) : decltype(fn(given...)){};
  } catch (const std::exception& error) {
    log(LogLevel::info, std::string("who holds growing memory was not found: ") + error.what());
  }
  return {};
}

}  // namespace

struct LeakFinder::Suspects {
  std::vector<LiveBlock> blocks;
  std::vector<Growth> growths;
};

LeakFinder::LeakFinder(GrowthOptions options, Search search, Sums sums)
    : options_(options), search_(std::move(search)), sums_(std::move(sums)) {
  growing({}, 0, options_);
}

std::vector<Leak> LeakFinder::check() {
  TORCH_CHECK(
      memory::tracking(),
      "memory is not tracked, so nothing is seen to grow; call start_tracking first (Python: "
      "use LeakFinder in a with statement)");
  Suspects suspects;
  suspects.blocks = memory::live_blocks_everywhere();
  suspects.growths = growing(suspects.blocks, memory::current_step(), options_);
  std::erase_if(suspects.growths, [&](const Growth& g) { return judged_.contains(g.site); });
  auto found = suspects.growths.empty() ? std::vector<Leak>() : judge(suspects);
  if (sums_) {
    std::ranges::move(judge_sums(suspects.blocks), std::back_inserter(found));
  }
  const bool trains = std::ranges::any_of(
      suspects.blocks, [](const LiveBlock& b) { return b.phase == memory::Phase::backward; });
  for (auto& leak : found) {
    leak.evaluation = !trains;
    leak.retained = memory::graphs_were_kept();
    log(LogLevel::warning, "memory grows: " + to_string(leak));
  }
  leaks_.insert(leaks_.end(), found.begin(), found.end());
  return found;
}

std::vector<Leak> LeakFinder::judge_sums(const std::vector<LiveBlock>& blocks) {
  std::vector<Leak> found;
  std::map<std::string, Run> runs;
  for (const auto& sum : or_nothing(sums_)) {
    const auto key = key_of(sum.holder, memory::kNoSite);
    auto run = runs_[key];
    run = {sum.length, sum.length > run.length ? run.steps + 1 : 0};
    runs[key] = run;
    if (run.steps < options_.warm_up + options_.steps || !announced_.insert(key).second) {
      continue;
    }
    Leak leak{.holder = sum.holder, .sites = {}, .steps = sum.length};
    const auto made = std::ranges::find(blocks, sum.holder.data, &LiveBlock::data);
    if (made != blocks.end()) {
      leak.sites.push_back(memory::to_string(memory::site(made->site)));
    }
    found.push_back(std::move(leak));
  }
  runs_ = std::move(runs);
  return found;
}

std::vector<Leak> LeakFinder::judge(const Suspects& suspects) {
  std::vector<const void*> data;
  std::vector<size_t> first_of;  // of each growth, among the data
  for (const auto& growth : suspects.growths) {
    first_of.push_back(data.size());
    for (const auto* sample : samples_of(growth, suspects.blocks)) {
      data.push_back(sample->data);
    }
  }
  auto holders = or_nothing(search_, data);
  holders.resize(data.size());
  std::unordered_map<const void*, uint32_t> site_of;
  for (const auto& block : suspects.blocks) {
    site_of.emplace(block.data, block.site);
  }
  std::map<std::string, Leak> by_holder;
  for (size_t i = 0; i < suspects.growths.size(); ++i) {
    const auto& growth = suspects.growths[i];
    const auto& holder =
        holders[first_of[i]];  // the oldest: a step's own variables hold none of it
    const bool late = growth.steps >= 2 * options_.steps;
    if (holder.kind == HolderKind::unknown && !late) {
      continue;
    }
    judged_.insert(growth.site);
    const auto key = key_of(holder, growth.site);
    if (holder.bounded || announced_.contains(key)) {
      continue;
    }
    auto [entry, is_new] = by_holder.try_emplace(key);
    auto& leak = entry->second;
    leak.holder = is_new ? holder : leak.holder;
    const auto made_at = site_of.find(holder.data);
    if (is_new && made_at != site_of.end()) {
      leak.sites.push_back(memory::to_string(memory::site(made_at->second)));
    }
    auto line = memory::to_string(memory::site(growth.site));
    if (std::ranges::find(leak.sites, line) == leak.sites.end()) {
      leak.sites.push_back(std::move(line));
    }
    leak.steps = std::max(leak.steps, growth.steps);
    leak.bytes += growth.bytes;
    leak.bytes_per_step += growth.bytes / growth.steps;
  }
  std::vector<Leak> found;
  for (auto& [key, leak] : by_holder) {
    announced_.insert(key);
    found.push_back(std::move(leak));
  }
  std::ranges::stable_sort(found, [](const Leak& a, const Leak& b) { return a.bytes > b.bytes; });
  return found;
}

}  // namespace brimful::probes
