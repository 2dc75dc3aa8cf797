#include "probes/leak/chain.h"

#include <algorithm>
#include <string>
#include <string_view>

namespace brimful::probes {
namespace {

bool may_be_link(const Holder& holder) {
  return holder.kind == HolderKind::variable || holder.kind == HolderKind::attribute ||
         holder.kind == HolderKind::sequence || holder.kind == HolderKind::mapping;
}

/// What the longer way has beyond the shorter one, if that is one piece that takes whole steps; else nothing.
std::string_view link_between(std::string_view older, std::string_view newer) {
  if (older.size() <= newer.size()) {
    return {};
  }
  const auto length = older.size() - newer.size();
  const auto [at, same] = std::ranges::mismatch(older, newer);
  const auto common = static_cast<size_t>(at - older.begin());
  const auto link = older.substr(common, length);
  const bool inserted = older.substr(common + length) == newer.substr(common);
  return inserted && link.find_first_of(".[") != std::string_view::npos ? link : std::string_view();
}

/// Where a step that is as long as the link is taken twice, one after the other.
size_t chain_start(std::string_view path, size_t length) {
  for (size_t i = 0; i + 2 * length <= path.size(); ++i) {
    const bool begins = path[i] == '.' || path[i] == '[';
    if (begins && path.substr(i, length) == path.substr(i + length, length)) {
      return i;
    }
  }
  return std::string_view::npos;
}

}  // namespace

void mark_chain(std::span<Holder> samples) {
  constexpr int kLinks = 2;
  int links = 0;
  std::string_view start;
  for (size_t i = 0; i + 1 < samples.size(); ++i) {
    const auto& older = samples[i];
    const auto& newer = samples[i + 1];
    if (!may_be_link(older) || !may_be_link(newer)) {
      continue;
    }
    const auto link = link_between(older.path, newer.path);
    if (link.empty()) {
      return;
    }
    ++links;
    const auto begin = chain_start(older.path, link.size());
    if (start.empty() && begin != std::string_view::npos) {
      start = std::string_view(older.path).substr(0, begin);
    }
  }
  if (links < kLinks || start.empty()) {
    return;
  }
  const std::string container(start);
  for (auto& holder : samples) {
    if (may_be_link(holder)) {
      holder.linked = true;
      holder.container = container;
    }
  }
}

}  // namespace brimful::probes
