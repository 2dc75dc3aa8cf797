// Expandable segments: a range of addresses for each pool, in which pages come and go.
#include <algorithm>
#include <iterator>
#include "base/units.h"
#include "memory/caching_pool.h"

namespace brimful::memory {
namespace {

constexpr int64_t kSmallPageBytes = 2 * kMiB;

}  // namespace

int64_t CachingBlocks::page_bytes(const PoolKey& pool) const {
  return pool.is_small ? kSmallPageBytes : settings_.large_segment_bytes;
}

/// A snapshot has the pages that are there: ranges of one pool are parts of one segment, which ends far behind them.
void CachingBlocks::add_unmapped_gaps() {
  const auto span = room_.total_bytes + room_.total_bytes / 8;
  std::map<PoolKey, At> last;
  std::map<uint64_t, Block> gaps;
  const auto add_tail = [&](At at) {
    const auto& block = at->second;
    const auto end = at->first + static_cast<uint64_t>(block.bytes);
    const auto bytes = static_cast<int64_t>(end - block.segment);
    const auto all = round_up(std::max(span, bytes), page_bytes(block.pool));
    if (all > bytes) {
      gaps[end] = {block.pool, block.segment, block.order, all - bytes, true, State::unmapped};
    }
  };
  for (auto at = blocks_.begin(); at != blocks_.end(); ++at) {
    auto& block = at->second;
    if (!block.is_expandable) {
      continue;
    }
    const auto [previous, is_first] = last.try_emplace(block.pool, at);
    if (is_first) {
      continue;
    }
    const auto& known = previous->second->second;
    const auto end = previous->second->first + static_cast<uint64_t>(known.bytes);
    if (at->first - known.segment > static_cast<uint64_t>(span)) {
      add_tail(previous->second);  // this one is of another segment
    } else {
      block.segment = known.segment;
      if (end < at->first) {
        gaps[end] = {block.pool, known.segment,  known.order, static_cast<int64_t>(at->first - end),
                     true,       State::unmapped};
      }
    }
    previous->second = at;
  }
  for (const auto& [pool, at] : last) {
    add_tail(at);
  }
  for (const auto& [address, gap] : gaps) {
    pools_[gap.pool].unmapped.insert(address);
    behind_all_ = std::max(behind_all_, address + static_cast<uint64_t>(gap.bytes));
  }
  blocks_.merge(gaps);
}

/// The lowest address with room behind it, of pages that are there and are free, or are not there.
CachingBlocks::At CachingBlocks::find_address_space(const Wanted& wanted) {
  const auto is_free = [&](At block) {
    return block != blocks_.end() &&
           (block->second.state == State::cached || block->second.state == State::unmapped);
  };
  auto& unmapped = pools_[wanted.pool].unmapped;
  for (const auto address : unmapped) {
    auto first = blocks_.find(address);
    if (const auto previous = before(first); is_free(previous)) {
      first = previous;
    }
    int64_t bytes = 0;
    for (auto block = first; bytes < wanted.bytes && is_free(block); block = after(block)) {
      bytes += block->second.bytes;
    }
    if (bytes >= wanted.bytes) {
      return first;
    }
  }
  const auto bytes = round_up(room_.total_bytes + room_.total_bytes / 8, page_bytes(wanted.pool));
  const auto address = behind_all_;
  behind_all_ += static_cast<uint64_t>(bytes);
  unmapped.insert(address);
  return blocks_
      .emplace(address, Block{wanted.pool, address, ++newest_, bytes, true, State::unmapped})
      .first;
}

/// Of an unmapped block the first pages that hold so many bytes; end() where the device has none left.
CachingBlocks::At CachingBlocks::map(At block, int64_t bytes) {
  const auto mapped = round_up(bytes, page_bytes(block->second.pool));
  if (mapped > room_.free_bytes) {
    return blocks_.end();
  }
  unlist(block);
  if (mapped < block->second.bytes) {
    list(split(block, mapped));
  }
  room_.free_bytes -= mapped;
  now_.reserved_bytes += mapped;
  block->second.state = State::cached;
  block = merge(block);
  list(block);
  return block;
}

CachingBlocks::At CachingBlocks::make_expandable(const Wanted& wanted) {
  auto block = find_address_space(wanted);
  if (block->second.state == State::unmapped) {
    block = map(block, std::min(block->second.bytes, wanted.bytes));
  }
  while (block != blocks_.end() && block->second.bytes < wanted.bytes) {
    const auto next = after(block);
    block = map(next, std::min(wanted.bytes - block->second.bytes, next->second.bytes));
  }
  if (block != blocks_.end()) {
    unlist(block);
  }
  return block;
}

/// Pages that are wholly within a cached block.
void CachingBlocks::unmap(At block) {
  const auto page = page_bytes(block->second.pool);
  const auto begin = static_cast<int64_t>(block->first - block->second.segment);
  const auto first = round_up(begin, page);
  const auto end = (begin + block->second.bytes) / page * page;
  if (first >= end) {
    return;
  }
  unlist(block);
  if (first > begin) {
    const auto rest = split(block, first - begin);
    list(block);
    block = rest;
  }
  if (block->second.bytes > end - first) {
    list(split(block, end - first));
  }
  room_.free_bytes += end - first;
  now_.reserved_bytes -= end - first;
  block->second.state = State::unmapped;
  block = merge(block);
  if (is_whole(block)) {
    blocks_.erase(block);
  } else {
    list(block);
  }
}

}  // namespace brimful::memory
