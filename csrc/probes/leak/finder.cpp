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
#include "probes/leak/left_steps.h"

namespace brimful::probes {
namespace {

using memory::LiveBlock;

/// So many times GrowthOptions::steps fill no cache that is meant to stop: longer ones are reported as leaks.
constexpr int64_t kSure = 5;

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
  samples.reserve(by_step.size());
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

/// A cache keeps tensors: no graphs, and nothing that only Python's own machinery has.
bool may_be_cache(const Holder& holder) {
  switch (holder.kind) {
    case HolderKind::unknown:
    case HolderKind::hook:
    case HolderKind::traceback:
    case HolderKind::cycle:
    case HolderKind::notebook:
      return false;
    default:
      return holder.node.empty() && !holder.has_graph && !holder.is_gradient;
  }
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
  const int64_t last = memory::current_step() - 2;  // as growing() says
  const auto left = left_behind(suspects.blocks, last);
  suspects.growths = growing_in(left, last, options_);
  std::map<uint32_t, Seen> seen;
  for (const auto& [site, steps] : left) {
    auto now = seen_[site];
    const auto added = std::distance(steps.upper_bound(now.last), steps.end());
    const auto count = static_cast<int64_t>(steps.size());
    now.let_go = count - added < now.steps ? last : now.let_go;
    now.steps = count;
    now.last = last;
    seen[site] = now;
  }
  seen_ = std::move(seen);
  std::erase_if(suspects.growths, [&](const Growth& g) { return lets_go(g, last); });
  forget_full(suspects.growths);
  std::erase_if(suspects.growths, [&](const Growth& g) {
    return judged_.contains(g.site) || (filling_.contains(g.site) && !is_ripe(g));
  });
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

/// A window of the newest tensors lets one go for each that comes.
bool LeakFinder::lets_go(const Growth& growth, int64_t last) const {
  const auto seen = seen_.find(growth.site);
  return seen != seen_.end() && seen->second.let_go >= 0 &&
         last - seen->second.let_go < options_.steps * growth.period;
}

bool LeakFinder::is_ripe(const Growth& growth) const {
  return growth.all_steps >= kSure * options_.steps && !growth.slowing;
}

bool LeakFinder::is_sure(const Holder& holder, const Growth& growth) const {
  return !may_be_cache(holder) || is_ripe(growth);
}

/// What may have been filling and grows no more was full.
void LeakFinder::forget_full(const std::vector<Growth>& growths) {
  std::set<std::string> growing;
  for (const auto& growth : growths) {
    if (const auto key = filling_.find(growth.site); key != filling_.end()) {
      growing.insert(key->second);
    }
  }
  std::erase_if(leaks_, [&](const Leak& leak) {
    return leak.filling && !growing.contains(key_of(leak.holder, memory::kNoSite));
  });
}

/// One sum more at each call is a run; so is one at even intervals.
LeakFinder::Run LeakFinder::next_run(Run run, int64_t length, int64_t check) {
  const auto before = std::exchange(run.length, length);
  if (length == before) {
    return run;
  }
  if (length < before) {
    return {.length = length};
  }
  const auto gap = run.steps == 0 ? 1 : check - run.grown;
  const auto least = run.steps < 2 ? gap : std::min(run.least, gap);
  const auto most = run.steps < 2 ? gap : std::max(run.most, gap);
  run.grown = check;
  if (most >= 2 * least) {  // two growths make an interval
    return {.length = length, .steps = 2, .grown = check, .least = gap, .most = gap};
  }
  run.least = least;
  run.most = most;
  ++run.steps;
  return run;
}

std::vector<Leak> LeakFinder::judge_sums(const std::vector<LiveBlock>& blocks) {
  std::vector<Leak> found;
  std::map<std::string, Run> runs;
  ++checks_;
  for (const auto& sum : or_nothing(sums_)) {
    const auto key = key_of(sum.holder, memory::kNoSite);
    const auto run = next_run(runs_[key], sum.length, checks_);
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
    const auto key = key_of(holder, growth.site);
    const bool sure = is_sure(holder, growth);
    if (holder.bounded || sure || announced_.contains(key)) {
      judged_.insert(growth.site);
    } else {
      filling_[growth.site] = key;
    }
    if (holder.bounded || announced_.contains(key)) {
      continue;
    }
    auto [entry, is_new] = by_holder.try_emplace(key);
    auto& leak = entry->second;
    leak.holder = is_new ? holder : leak.holder;
    leak.filling = !sure && (is_new || leak.filling);
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
  return settle(std::move(by_holder));
}

/// Each holder once as what may be filling, and once as what is sure, which takes the other's place.
std::vector<Leak> LeakFinder::settle(std::map<std::string, Leak>&& by_holder) {
  std::vector<Leak> found;
  for (auto& [key, leak] : by_holder) {
    if (!leak.filling) {
      announced_.insert(key);
      std::erase_if(leaks_, [&key = key](const Leak& other) {
        return other.filling && key_of(other.holder, memory::kNoSite) == key;
      });
    } else if (!hinted_.insert(key).second) {
      continue;
    }
    found.push_back(std::move(leak));
  }
  std::ranges::stable_sort(found, [](const Leak& a, const Leak& b) { return a.bytes > b.bytes; });
  return found;
}

}  // namespace brimful::probes
