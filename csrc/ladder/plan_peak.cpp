#include "ladder/plan_peak.h"

#include <algorithm>
#include <map>
#include <utility>

#include "ladder/plan_timeline.h"

namespace brimful::ladder {
namespace {
// A generator's state on the CPU, which a recomputed call keeps, and of which its recomputation makes three more.
constexpr int64_t kGeneratorBytes = 5056;

constexpr int64_t kSmallBytes = 1024;

enum class Way : uint8_t { kept, recomputed, offloaded };

/// How what a call saves is treated, and by which call around it that is so.
struct Owner {
  Way way = Way::kept;
  int64_t call = kNever;
};

bool has(const std::vector<int32_t>& modules, int32_t module) {
  return std::binary_search(modules.begin(), modules.end(), module);
}

std::vector<Owner> owners_of(const StepEvents& step, const Rungs& rungs) {
  std::vector<Owner> owners(step.calls.size());
  for (size_t i = 0; i < step.calls.size(); ++i) {
    const auto& call = step.calls[i];
    const auto own = static_cast<int64_t>(i);
    if (call.parent != kNever && owners[static_cast<size_t>(call.parent)].way != Way::kept) {
      owners[i] = owners[static_cast<size_t>(call.parent)];
    } else if (has(rungs.recomputed, call.module)) {
      owners[i] = {Way::recomputed, own};
    } else if (has(rungs.offloaded, call.module)) {
      owners[i] = {Way::offloaded, own};
    }
  }
  return owners;
}

/// A call that is recomputed.
struct Group {
  int64_t used_at = kNever;
  int64_t dropped_at = kNever;
  int64_t last_saved_at = kNever;
  std::map<int64_t, int64_t>
      inside;  ///< blocks that it saves and makes itself, with the moment of the last drop
};

int64_t later(int64_t a, int64_t b) {
  return a == kNever || b == kNever ? kNever : std::max(a, b);
}

bool is_inside(const StepEvents::Block& block, const StepEvents::Call& call) {
  return block.taken_at > call.entered_at && block.taken_at < call.left_at;
}

class Plan {
 public:
  Plan(const StepEvents& step, const Rungs& rungs, const std::vector<bool>& whole, bool lists)
      : step_(step),
        whole_(whole),
        everything_(rungs.everything),
        ahead_(rungs.ahead),
        owners_(owners_of(step, rungs)),
        timeline_(step.size, lists) {
    for (const auto& block : step.blocks) {
      ends_.push_back(block.given_back_at);
    }
  }

  PlanCost cost() {
    gather();
    for (const auto& [call, group] : groups_) {
      recompute(step_.calls[static_cast<size_t>(call)], group);
    }
    for (size_t i = 0; i < step_.blocks.size(); ++i) {
      const auto& block = step_.blocks[i];
      timeline_.hold(block.bytes, block.taken_at, ends_[i]);
    }
    cost_.peak_bytes = timeline_.peak_bytes();
    return cost_;
  }
  const PlanTimeline& timeline() const { return timeline_; }

 private:
  Owner owner_of(const StepEvents::Save& save) const {
    if (everything_) {
      return {Way::offloaded, kNever};
    }
    return save.call == kNever ? Owner{} : owners_[static_cast<size_t>(save.call)];
  }
  void hold_until(int64_t block, int64_t moment) {
    auto& end = ends_[static_cast<size_t>(block)];
    end = later(end, moment);
  }

  void gather() {
    for (const auto& save : step_.saves) {
      const auto owner = owner_of(save);
      if (owner.way == Way::recomputed) {
        gather(save, groups_[owner.call], step_.calls[static_cast<size_t>(owner.call)]);
      } else if (save.block != kNever && owner.way == Way::kept) {
        hold_until(save.block, save.dropped_at);
      } else if (save.block != kNever) {
        put_aside(save);
      }
    }
    bring_back();
    for (const auto& [call, group] : groups_) {
      for (const auto block : step_.calls[static_cast<size_t>(call)].arguments) {
        hold_until(block, group.dropped_at);
      }
    }
  }

  void gather(const StepEvents::Save& save, Group& group, const StepEvents::Call& call) {
    const bool first = group.last_saved_at == kNever;
    group.last_saved_at = std::max(group.last_saved_at, save.saved_at);
    group.dropped_at = first ? save.dropped_at : later(group.dropped_at, save.dropped_at);
    if (save.used_at != kNever && (group.used_at == kNever || save.used_at < group.used_at)) {
      group.used_at = save.used_at;
    }
    if (save.block == kNever) {
      return;
    }
    if (!is_inside(step_.blocks[static_cast<size_t>(save.block)], call)) {
      hold_until(save.block, save.dropped_at);
      return;
    }
    const auto [place, fresh] = group.inside.try_emplace(save.block, save.dropped_at);
    place->second = fresh ? save.dropped_at : later(place->second, save.dropped_at);
  }

  void put_aside(const StepEvents::Save& save) {
    const auto [place, is_new] = place_aside_.try_emplace(save.block, aside_.size());
    if (is_new) {
      aside_.push_back({save.block, {}});
      cost_.more_ms += static_cast<double>(bytes_of(save.block)) * step_.offload_ms_per_byte;
    }
    if (save.used_at != kNever) {
      aside_[place->second].uses.emplace_back(save.used_at, save.dropped_at);
    }
  }

  /// On CUDA: each time that it is used, or before, when what was put aside behind it is.
  void bring_back() {
    if (!step_.brought_back) {
      return;
    }
    for (auto& each : aside_) {
      std::sort(each.uses.begin(), each.uses.end());
    }
    for (size_t i = 0; i < aside_.size(); ++i) {
      auto uses = aside_[i].uses;
      const auto ahead = ahead_ ? used_behind(i) : kNever;
      if (ahead != kNever && uses.empty()) {
        uses.emplace_back(ahead, kNever);
      } else if (ahead != kNever) {
        uses.front().first = std::min(uses.front().first, ahead);
      }
      hold_each(bytes_of(aside_[i].block), uses);
    }
  }

  /// When what was put aside behind it is first used. Small storages stay where they are, and are passed over.
  int64_t used_behind(size_t place) const {
    int64_t first = kNever;
    for (auto i = place + 1; i < aside_.size(); ++i) {
      const auto& uses = aside_[i].uses;
      if (!uses.empty() && (first == kNever || uses.front().first < first)) {
        first = uses.front().first;
      }
      if (bytes_of(aside_[i].block) > kSmallBytes) {
        break;
      }
    }
    return first;
  }

  /// Once where times overlap.
  void hold_each(int64_t bytes, const std::vector<std::pair<int64_t, int64_t>>& times) {
    for (size_t i = 0; i < times.size();) {
      auto [from, to] = times[i];
      for (++i; i < times.size() && (to == kNever || times[i].first <= to); ++i) {
        to = later(to, times[i].second);
      }
      timeline_.hold(bytes, from, to);
    }
  }
  int64_t bytes_of(int64_t block) const { return step_.blocks[static_cast<size_t>(block)].bytes; }

  /// Its forward runs again where backward first uses what it saved, until it has saved all of it.
  void recompute(const StepEvents::Call& call, const Group& group) {
    cost_.more_ms += call.forward_ms + kCallMs;
    timeline_.hold(call.copied_bytes + generator_bytes(), call.entered_at, group.dropped_at);
    if (group.used_at == kNever) {
      return;
    }
    const auto module = static_cast<size_t>(call.module);
    const bool is_whole = module < whole_.size() && whole_[module];
    const auto ended_at = is_whole ? call.left_at : group.last_saved_at;
    std::vector<PlanTimeline::Again> again;
    for (size_t i = 0; i < step_.blocks.size(); ++i) {
      const auto& block = step_.blocks[i];
      if (!is_inside(block, call) || block.taken_at > ended_at) {
        continue;
      }
      const auto saved = group.inside.find(static_cast<int64_t>(i));
      const bool is_kept = saved != group.inside.end();
      const bool ends = block.given_back_at != kNever && block.given_back_at < ended_at;
      again.push_back({block.bytes, block.taken_at, ends ? block.given_back_at : kNever, is_kept,
                       is_kept ? saved->second : kNever});
    }
    timeline_.run_again(group.used_at, call.copied_bytes + 3 * generator_bytes(), again);
  }
  /// A CUDA generator's state lies on the host as well.
  int64_t generator_bytes() const { return step_.brought_back ? 0 : kGeneratorBytes; }

  const StepEvents& step_;
  const std::vector<bool>& whole_;
  bool everything_;
  bool ahead_;
  std::vector<Owner> owners_;
  PlanTimeline timeline_;
  std::vector<int64_t> ends_;  ///< of blocks
  std::map<int64_t, Group> groups_;
  struct OnHost {
    int64_t block;
    std::vector<std::pair<int64_t, int64_t>> uses;  ///< until it is dropped
  };
  std::vector<OnHost> aside_;  ///< in the order in which they were put there
  std::map<int64_t, size_t> place_aside_;
  PlanCost cost_;
};
}  // namespace

PlanCost cost_of(const StepEvents& step, const Rungs& rungs, const std::vector<bool>& whole) {
  return Plan(step, rungs, whole, false).cost();
}

std::vector<memory::CachingRequest> requests_of(const StepEvents& step, const Rungs& rungs,
                                                const std::vector<bool>& whole, uint64_t stream) {
  Plan plan(step, rungs, whole, true);
  plan.cost();
  return plan.timeline().requests(stream);
}

}  // namespace brimful::ladder
