// What goes back to the device: before memory runs out, and by torch's garbage collection.
#include <algorithm>
#include <iterator>
#include "memory/caching_pool.h"

namespace brimful::memory {

void CachingBlocks::release(At block) {
  unlist(block);
  now_.reserved_bytes -= block->second.bytes;
  room_.free_bytes += block->second.bytes;
  blocks_.erase(block);
}

/// With max_split_size: of the blocks that are never split one that is large enough, else the largest ones.
bool CachingBlocks::release_oversize(const Wanted& wanted) {
  const auto limit = settings_.max_split_bytes;
  if (limit == std::numeric_limits<int64_t>::max()) {
    return false;
  }
  auto& cached = pools_[wanted.pool].cached;
  const auto needed = std::max(wanted.bytes, limit);
  int64_t released = 0;
  while (released < needed && !cached.empty()) {
    const auto large_enough = cached.lower_bound(least_fit(needed));
    const auto block = block_of(large_enough != cached.end() ? *large_enough : *cached.rbegin());
    if (block->second.bytes < limit || block->second.is_expandable) {
      return false;
    }
    released += block->second.bytes;
    release(block);
  }
  return released >= needed;
}

void CachingBlocks::release_all() {
  const auto all_that_are = [&](State state) {
    std::vector<uint64_t> addresses;
    for (const auto& [address, block] : blocks_) {
      if (block.state == state) {
        addresses.push_back(address);
      }
    }
    return addresses;
  };
  ++releases_;
  for (const auto address : all_that_are(State::pending)) {
    complete(address);
  }
  for (const auto address : all_that_are(State::cached)) {
    const auto block = blocks_.find(address);
    if (block->second.is_expandable) {
      unmap(block);
    } else if (is_whole(block)) {
      release(block);
    }
  }
}

/// Of the large pool, and of all streams: those that were not taken for longer than the average, until enough is free.
void CachingBlocks::collect_garbage() {
  const auto allowed = static_cast<double>(*room_.allowed_bytes);
  const auto threshold = static_cast<int64_t>(settings_.garbage_collection_threshold * allowed);
  const auto age_of = [&](At block) { return searches_[false] - block->second.cached_at; };
  std::vector<At> whole;
  int64_t ages = 0;
  for (auto block = blocks_.begin(); block != blocks_.end(); ++block) {
    if (block->second.state == State::cached && !block->second.pool.is_small &&
        !block->second.is_expandable && is_whole(block)) {
      whole.push_back(block);
      ages += age_of(block);
    }
  }
  bool released = true;
  auto excess = now_.reserved_bytes - threshold;
  while (excess > 0 && released && !whole.empty()) {
    const auto average = static_cast<double>(ages) / static_cast<double>(whole.size());
    const auto old = std::partition(whole.begin(), whole.end(), [&](At block) {
      return static_cast<double>(age_of(block)) < average;
    });
    released = old != whole.end();
    std::for_each(old, whole.end(), [&](At block) {
      excess -= block->second.bytes;
      ages -= age_of(block);
      release(block);
    });
    whole.erase(old, whole.end());
  }
}

}  // namespace brimful::memory
