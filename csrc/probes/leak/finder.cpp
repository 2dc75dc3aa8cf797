#include <brimful/log.h>
#include <brimful/probes/leak_finder.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <span>
#include <unordered_map>
#include <utility>

#include "memory/moment.h"
#include "memory/tracker.h"
#include "probes/leak/chain.h"
#include "probes/leak/copied_growth.h"
#include "probes/leak/left_steps.h"

namespace brimful::probes {
namespace {

using memory::LiveBlock;

/// So many times GrowthOptions::steps fill no cache that is meant to stop: longer ones are reported as leaks.
constexpr int64_t kSure = 5;
/// Of bytes that are sums of fractions.
constexpr double kRounding = 1e-9;

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

/// Whether this step's operators were followed.
bool is_known(const CopiedGrowth& copies) {
  return std::ranges::any_of(copies.blocks,
                             [](const CopiedBlock& block) { return block.copied_bytes > 0; });
}

/// It is what grows, and no container on the way to it.
Holder as_value(Holder holder) {
  if (holder.kind == HolderKind::sequence || holder.kind == HolderKind::mapping) {
    holder.kind = HolderKind::attribute;
    holder.container = holder.path;
    holder.bounded = false;
  }
  return holder;
}

}  // namespace

struct LeakFinder::Suspects {
  std::vector<LiveBlock> blocks;
  std::vector<Growth> growths;
  std::vector<CopiedGrowth> copies;
};

struct LeakFinder::Judged {
  std::map<std::string, Leak> by_holder;
  std::unordered_map<const void*, uint32_t> site_of;
};

LeakFinder::LeakFinder(GrowthOptions options, Search search, Sums sums)
    : options_(options),
      search_(std::move(search)),
      sums_(std::move(sums)),
      copies_(std::make_shared<CopiedSites>()) {
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
  const auto wants = [&](uint32_t site, int64_t growths) {
    return !judged_.contains(site) &&
           (!filling_.contains(site) || growths >= kSure * options_.steps);
  };
  suspects.copies = copies_->look(suspects.blocks, memory::current_step() - 1, options_, wants);
  std::erase_if(suspects.copies, [&](const CopiedGrowth& copies) {
    return std::ranges::find(suspects.growths, copies.growth.site, &Growth::site) !=
           suspects.growths.end();
  });
  forget_full(suspects);
  const auto is_done = [&](const Growth& g) {
    return judged_.contains(g.site) || (filling_.contains(g.site) && !is_ripe(g));
  };
  std::erase_if(suspects.growths, is_done);
  std::erase_if(suspects.copies,
                [&](const CopiedGrowth& c) { return is_done(c.growth) || !is_known(c); });
  auto found =
      suspects.growths.empty() && suspects.copies.empty() ? std::vector<Leak>() : judge(suspects);
  if (sums_) {
    std::ranges::move(judge_sums(suspects.blocks), std::back_inserter(found));
  }
  const bool trains = memory::backward_ran();
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
void LeakFinder::forget_full(const Suspects& suspects) {
  std::set<std::string> growing;
  const auto grows = [&](const Growth& growth) {
    if (const auto keys = filling_.find(growth.site); keys != filling_.end()) {
      growing.insert(keys->second.begin(), keys->second.end());
    }
  };
  std::ranges::for_each(suspects.growths, grows);
  std::ranges::for_each(suspects.copies, grows, &CopiedGrowth::growth);
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

/// What of a site's growth is whose.
void LeakFinder::add(const Growth& growth, const Holder& holder, Judged& judged, bool copied) {
  const bool late = growth.steps >= 2 * options_.steps;
  if (holder.kind == HolderKind::unknown && !late) {
    return;
  }
  const auto key = key_of(holder, growth.site);
  const bool sure = is_sure(holder, growth);
  if (holder.bounded || sure || announced_.contains(key)) {
    judged_.insert(growth.site);
  } else {
    filling_[growth.site].insert(key);
  }
  if (holder.bounded || announced_.contains(key)) {
    return;
  }
  auto [entry, is_new] = judged.by_holder.try_emplace(key);
  auto& leak = entry->second;
  leak.holder = is_new ? holder : leak.holder;
  leak.filling = !sure && (is_new || leak.filling);
  leak.copied = copied && (is_new || leak.copied);
  const auto made_at = judged.site_of.find(holder.data);
  if (is_new && made_at != judged.site_of.end()) {
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

/// Those holders that have more than was copied into them.
void LeakFinder::judge_copies(const CopiedGrowth& copies, std::span<const Holder> holders,
                              Judged& judged) {
  struct Held {
    Holder holder;
    double bytes = 0;
    double copied = 0;
  };
  const auto key = [&](size_t i) { return key_of(holders[i], copies.growth.site); };
  std::set<std::string> by_items;  // a container of which some are no copies has more of them
  for (size_t i = 0; i < holders.size(); ++i) {
    if (copies.blocks[i].copied_bytes == 0) {
      by_items.insert(key(i));
    }
  }
  std::map<std::string, Held> all;
  for (size_t i = 0; i < holders.size(); ++i) {
    const auto holder = by_items.contains(key(i)) ? holders[i] : as_value(holders[i]);
    auto& held =
        all.try_emplace(key_of(holder, copies.growth.site), Held{.holder = holder}).first->second;
    held.bytes += static_cast<double>(copies.blocks[i].bytes);
    held.copied += copies.blocks[i].copied_bytes;
  }
  std::erase_if(all, [](const auto& entry) {
    const Held& held = entry.second;
    return held.copied == 0 || held.bytes - held.copied <= held.bytes * kRounding;
  });
  double bytes = 0;
  for (const auto& [name, held] : all) {
    bytes += held.bytes;
  }
  for (const auto& [name, held] : all) {
    auto share = copies.growth;
    share.bytes = static_cast<int64_t>(static_cast<double>(share.bytes) * held.bytes / bytes);
    add(share, held.holder, judged, true);
  }
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
  first_of.push_back(data.size());
  for (const auto& copies : suspects.copies) {
    std::ranges::transform(copies.blocks, std::back_inserter(data), &CopiedBlock::data);
  }
  auto holders = or_nothing(search_, data);
  holders.resize(data.size());
  Judged judged;
  for (const auto& block : suspects.blocks) {
    judged.site_of.emplace(block.data, block.site);
  }
  for (size_t i = 0; i < suspects.growths.size(); ++i) {
    // The oldest: a step's own variables hold none of it. In a chain it may be too deep to be found.
    const std::span samples(holders.data() + first_of[i], first_of[i + 1] - first_of[i]);
    mark_chain(samples);
    const auto link = std::ranges::find_if(samples, &Holder::linked);
    const auto& oldest = samples.front();
    const bool by_link = oldest.kind == HolderKind::unknown && link != samples.end();
    add(suspects.growths[i], by_link ? *link : oldest, judged, false);
  }
  size_t first = first_of.back();
  for (const auto& copies : suspects.copies) {
    judge_copies(copies, std::span(holders).subspan(first, copies.blocks.size()), judged);
    first += copies.blocks.size();
  }
  return settle(std::move(judged.by_holder));
}

void LeakFinder::rest() {
  copies_->rest();
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
