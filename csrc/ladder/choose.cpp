#include "ladder/choose.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "ladder/call_bytes.h"

namespace brimful::ladder {
namespace {
constexpr int64_t kLevels = 192;
constexpr int64_t kMostTried = 800;  // plans, where all of them are tried
constexpr int kBounds = 14;
constexpr double kForever = std::numeric_limits<double>::infinity();

/// Cheapest ways through a part of the forward, by the bytes that are held behind it.
struct Table {
  struct Entry {
    double ms = kForever;
    int64_t held_bytes = 0;
    Rungs rungs;
  };
  std::vector<Entry> entries = std::vector<Entry>(kLevels + 1);
};

void add(std::vector<int32_t>& modules, int32_t module) {
  const auto place = std::lower_bound(modules.begin(), modules.end(), module);
  if (place == modules.end() || *place != module) {
    modules.insert(place, module);
  }
}

/// A dynamic program over calls in their order: of ways that hold about as much behind a call the cheapest is followed.
class Program {
 public:
  Program(const StepEvents& step, const std::vector<CallBytes>& bytes, const Allowed& allowed,
          int64_t bound_bytes)
      : step_(step), bytes_(bytes), allowed_(allowed), bound_bytes_(bound_bytes) {}

  std::optional<Rungs> run() const {
    Table table;
    table.entries[0].ms = 0;
    for (const auto call : outer_calls(step_)) {
      table = through(call, table);
    }
    const auto best = std::min_element(table.entries.begin(), table.entries.end(),
                                       [](const auto& a, const auto& b) { return a.ms < b.ms; });
    return best->ms < kForever ? std::optional(best->rungs) : std::nullopt;
  }

 private:
  bool is_allowed(const std::vector<bool>& modules, int32_t module) const {
    return static_cast<size_t>(module) < modules.size() && modules[static_cast<size_t>(module)];
  }

  Table through(int64_t place, const Table& before) const {
    const auto& call = step_.calls[static_cast<size_t>(place)];
    const auto& bytes = bytes_[static_cast<size_t>(place)];
    Table after = through_inner(place, before);
    for (const auto& entry : before.entries) {
      const auto held = entry.held_bytes;
      if (entry.ms == kForever || held + bytes.forward > bound_bytes_) {
        continue;
      }
      if (is_allowed(allowed_.recompute, call.module) && bytes.saved > bytes.arguments &&
          held + bytes.saved + std::max(bytes.backward, bytes.forward) <= bound_bytes_) {
        auto rungs = entry.rungs;
        add(rungs.recomputed, call.module);
        offer(after, held + bytes.arguments, entry.ms + call.forward_ms + kCallMs, rungs);
      }
      const auto brought_back = step_.brought_back ? bytes.saved : 0;
      if (is_allowed(allowed_.offload, call.module) && bytes.saved > 0 &&
          held + brought_back + bytes.backward <= bound_bytes_) {
        auto rungs = entry.rungs;
        add(rungs.offloaded, call.module);
        offer(after, held, entry.ms + static_cast<double>(bytes.saved) * step_.offload_ms_per_byte,
              rungs);
      }
    }
    return after;
  }

  /// The calls inside one after the other, then what the call saves by itself; of a call without others all that it saves.
  Table through_inner(int64_t place, const Table& before) const {
    const auto& bytes = bytes_[static_cast<size_t>(place)];
    auto own = bytes.saved;
    Table table = before;
    for (const auto inner : bytes.inner) {
      own -= bytes_[static_cast<size_t>(inner)].saved;
      table = through(inner, table);
    }
    Table after;
    const auto backward = bytes.inner.empty() ? bytes.backward : 0;
    for (const auto& entry : table.entries) {
      if (entry.ms < kForever && entry.held_bytes + own + backward <= bound_bytes_) {
        offer(after, entry.held_bytes + own, entry.ms, entry.rungs);
      }
    }
    return after;
  }

  void offer(Table& table, int64_t held_bytes, double ms, const Rungs& rungs) const {
    if (held_bytes > bound_bytes_) {
      return;
    }
    auto& entry = table.entries[static_cast<size_t>(held_bytes * kLevels / bound_bytes_)];
    if (ms < entry.ms || (ms == entry.ms && held_bytes < entry.held_bytes)) {
      entry = {ms, held_bytes, rungs};
    }
  }

  const StepEvents& step_;
  const std::vector<CallBytes>& bytes_;
  const Allowed& allowed_;
  int64_t bound_bytes_;
};

class Best {
 public:
  Best(const StepEvents& step, const Allowed& allowed, int64_t room_bytes, const Fits& fits,
       bool ahead)
      : step_(step), whole_(allowed.whole), room_bytes_(room_bytes), fits_(fits), ahead_(ahead) {}

  bool offer(Rungs rungs) {
    rungs.ahead = ahead_ && !rungs.offloaded.empty();
    const auto cost = cost_of(step_, rungs, whole_);
    if (cost.peak_bytes > room_bytes_) {
      return false;
    }
    const bool is_better = !best_ || cost.more_ms < best_->cost.more_ms;
    if (is_better && fits_ && !fits_(rungs)) {
      return false;
    }
    if (is_better) {
      best_ = {std::move(rungs), cost};
    }
    return true;
  }
  const std::optional<Choice>& best() const { return best_; }

 private:
  const StepEvents& step_;
  const std::vector<bool>& whole_;
  int64_t room_bytes_;
  const Fits& fits_;
  bool ahead_;
  std::optional<Choice> best_;
};

/// All ways to treat a call and those inside it, until there are too many.
std::vector<Rungs> all_ways(const StepEvents& step, const std::vector<CallBytes>& bytes,
                            const Allowed& allowed, const std::vector<int64_t>& calls) {
  std::vector<Rungs> ways{{}};
  for (const auto place : calls) {
    const auto module = step.calls[static_cast<size_t>(place)].module;
    auto own = all_ways(step, bytes, allowed, bytes[static_cast<size_t>(place)].inner);
    if (own.empty()) {
      return {};
    }
    if (bytes[static_cast<size_t>(place)].saved > 0) {
      if (allowed.recompute[static_cast<size_t>(module)]) {
        own.push_back({{module}, {}});
      }
      if (allowed.offload[static_cast<size_t>(module)]) {
        own.push_back({{}, {module}});
      }
    }
    if (static_cast<int64_t>(ways.size() * own.size()) > kMostTried) {
      return {};
    }
    std::vector<Rungs> products;
    for (const auto& way : ways) {
      for (const auto& more : own) {
        auto product = way;
        for (const auto each : more.recomputed) {
          add(product.recomputed, each);
        }
        for (const auto each : more.offloaded) {
          add(product.offloaded, each);
        }
        products.push_back(std::move(product));
      }
    }
    ways = std::move(products);
  }
  return ways;
}

/// What is chosen and not needed goes again, the dearest first.
void leave_out(const StepEvents& step, Best& best) {
  std::vector<double> ms;
  for (const auto& call : step.calls) {
    ms.resize(std::max(ms.size(), static_cast<size_t>(call.module) + 1));
    ms[static_cast<size_t>(call.module)] += call.forward_ms;
  }
  const auto rungs = best.best()->rungs;
  auto order = rungs.recomputed;
  order.insert(order.end(), rungs.offloaded.begin(), rungs.offloaded.end());
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) {
    return ms[static_cast<size_t>(a)] > ms[static_cast<size_t>(b)];
  });
  for (const auto module : order) {
    auto fewer = best.best()->rungs;
    std::erase(fewer.recomputed, module);
    std::erase(fewer.offloaded, module);
    best.offer(fewer);
  }
}

std::optional<Choice> cheapest(const StepEvents& step, const Allowed& allowed, int64_t room_bytes,
                               const Fits& fits, bool ahead) {
  Best best(step, allowed, room_bytes, fits, ahead);
  if (room_bytes <= 0 || best.offer({})) {
    return best.best();
  }
  const auto bytes = bytes_of_calls(step);
  const auto ways = all_ways(step, bytes, allowed, outer_calls(step));
  for (const auto& way : ways) {
    best.offer(way);
  }
  if (!ways.empty()) {
    return best.best();
  }
  // The program's sums are a little off: between the bounds where its plans fit and where they do not.
  double too_high = 2.0;
  double low = 0;
  double share = 1.0;
  for (int i = 0; i < kBounds; ++i) {
    const auto bound = static_cast<int64_t>(share * static_cast<double>(room_bytes));
    const auto rungs = bound > 0 ? Program(step, bytes, allowed, bound).run() : std::nullopt;
    if (rungs && !best.offer(*rungs)) {
      too_high = share;
    } else {
      low = share;
    }
    share = (low + too_high) / 2;
  }
  if (best.best()) {
    leave_out(step, best);
  }
  return best.best();
}
}  // namespace

std::optional<Choice> cheapest(const StepEvents& step, const Allowed& allowed, int64_t room_bytes,
                               const Fits& fits) {
  auto choice = cheapest(step, allowed, room_bytes, fits, /*ahead=*/step.brought_back);
  if (!choice && step.brought_back) {
    choice = cheapest(step, allowed, room_bytes, fits, /*ahead=*/false);
  }
  return choice;
}

}  // namespace brimful::ladder
