#include "ladder/call_bytes.h"

#include <algorithm>
#include <set>

namespace brimful::ladder {
namespace {

/// What is in use after each moment, with all that is saved put aside.
std::vector<int64_t> levels_of(const StepEvents& step) {
  std::vector<int64_t> levels(static_cast<size_t>(step.size) + 1, 0);
  for (const auto& block : step.blocks) {
    levels[static_cast<size_t>(block.taken_at)] += block.bytes;
    if (block.given_back_at != kNever) {
      levels[static_cast<size_t>(block.given_back_at)] -= block.bytes;
    }
  }
  for (size_t i = 1; i < levels.size(); ++i) {
    levels[i] += levels[i - 1];
  }
  return levels;
}

int64_t most_between(const std::vector<int64_t>& levels, int64_t begin, int64_t end) {
  const auto first = levels.begin() + begin;
  return first == levels.end() || begin >= end ? 0 : *std::max_element(first, levels.begin() + end);
}

template <typename Visit>
void for_each_around(const StepEvents& step, int64_t call, const Visit& visit) {
  for (; call != kNever; call = step.calls[static_cast<size_t>(call)].parent) {
    visit(static_cast<size_t>(call));
  }
}
}  // namespace

std::vector<int64_t> outer_calls(const StepEvents& step) {
  std::vector<int64_t> outer;
  for (size_t i = 0; i < step.calls.size(); ++i) {
    if (step.calls[i].parent == kNever && step.calls[i].piece == step.calls.back().piece) {
      outer.push_back(static_cast<int64_t>(i));
    }
  }
  return outer;
}

std::vector<CallBytes> bytes_of_calls(const StepEvents& step) {
  const auto levels = levels_of(step);
  std::vector<CallBytes> calls(step.calls.size());
  std::vector<std::pair<int64_t, int64_t>> windows(step.calls.size(), {step.size, 0});
  std::set<int64_t> seen;
  for (const auto& save : step.saves) {
    const bool fresh = save.block != kNever && seen.insert(save.block).second;
    for_each_around(step, save.call, [&](size_t call) {
      calls[call].saved += fresh ? step.blocks[static_cast<size_t>(save.block)].bytes : 0;
      auto& [begin, end] = windows[call];
      begin = save.used_at == kNever ? begin : std::min(begin, save.used_at);
      end = std::max(end, save.dropped_at == kNever ? step.size : save.dropped_at);
    });
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    const auto& call = step.calls[i];
    calls[i].forward = most_between(levels, call.entered_at, call.left_at);
    calls[i].backward = most_between(levels, windows[i].first, windows[i].second);
    for (const auto block : call.arguments) {
      calls[i].arguments += step.blocks[static_cast<size_t>(block)].bytes;
    }
    calls[i].arguments += call.copied_bytes;
    if (call.parent != kNever) {
      calls[static_cast<size_t>(call.parent)].inner.push_back(static_cast<int64_t>(i));
    }
  }
  return calls;
}

}  // namespace brimful::ladder
