#include "memory/caching_pool.h"
#include <algorithm>
#include <iterator>
#include "base/units.h"

namespace brimful::memory {
namespace {

constexpr int64_t kSmallBytes = kMiB;  // the largest request of the small pool
constexpr int64_t kSmallSegmentBytes = 2 * kMiB;
constexpr int64_t kSharedSegmentBytes = 10 * kMiB;  // smaller requests share a large segment
constexpr int64_t kSegmentStepBytes = 2 * kMiB;
constexpr int64_t kLeastRestBytes = 512;

int64_t segment_bytes_of(int64_t bytes, const CachingSettings& settings) {
  if (bytes <= kSmallBytes) {
    return kSmallSegmentBytes;
  }
  return bytes < kSharedSegmentBytes ? settings.large_segment_bytes
                                     : round_up(bytes, kSegmentStepBytes);
}

}  // namespace

CachingBlocks::CachingBlocks(const std::vector<CachingSegment>& segments,
                             const CachingSettings& settings, const CachingRoom& room)
    : settings_(settings), room_(room) {
  for (const auto& segment : segments) {
    add_segment(segment);
  }
  add_unmapped_gaps();
}

void CachingBlocks::add_segment(const CachingSegment& segment) {
  const PoolKey pool{segment.stream, segment.is_small};
  newest_ = std::max(newest_, segment.order);
  uint64_t address = segment.address;
  for (const auto& known : segment.blocks) {
    now_.reserved_bytes += known.bytes;
    now_.allocated_bytes += known.state == State::live ? known.bytes : 0;
    if (!segment.is_private) {
      const auto at =
          blocks_
              .emplace(address, Block{pool, segment.address, segment.order, known.bytes,
                                      segment.is_expandable, known.state, -known.searches})
              .first;
      if (known.state == State::cached) {
        pools_[pool].cached.insert(fit_of(at));
      }
      behind_all_ = std::max(behind_all_, at->first + static_cast<uint64_t>(known.bytes));
    }
    address += static_cast<uint64_t>(known.bytes);
  }
}

CachingBlocks::At CachingBlocks::before(At block) {
  if (block == blocks_.begin()) {
    return blocks_.end();
  }
  const auto previous = std::prev(block);
  return previous->second.segment == block->second.segment ? previous : blocks_.end();
}

CachingBlocks::At CachingBlocks::after(At block) {
  const auto next = std::next(block);
  return next != blocks_.end() && next->second.segment == block->second.segment ? next
                                                                                : blocks_.end();
}

void CachingBlocks::list(At block) {
  auto& it = block->second;
  auto& pool = pools_[it.pool];
  if (it.state == State::unmapped) {
    pool.unmapped.insert(block->first);
  } else {
    it.cached_at = searches_[it.pool.is_small];
    pool.cached.insert(fit_of(block));
  }
}

void CachingBlocks::unlist(At block) {
  auto& pool = pools_[block->second.pool];
  if (block->second.state == State::unmapped) {
    pool.unmapped.erase(block->first);
  } else {
    pool.cached.erase(fit_of(block));
  }
}

CachingBlocks::At CachingBlocks::split(At block, int64_t bytes) {
  Block rest = block->second;
  rest.bytes -= bytes;
  block->second.bytes = bytes;
  return blocks_.emplace(block->first + static_cast<uint64_t>(bytes), rest).first;
}

CachingBlocks::At CachingBlocks::merge(At block) {
  if (const auto next = after(block);
      next != blocks_.end() && next->second.state == block->second.state) {
    unlist(next);
    block->second.bytes += next->second.bytes;
    blocks_.erase(next);
  }
  if (const auto previous = before(block);
      previous != blocks_.end() && previous->second.state == block->second.state) {
    unlist(previous);
    previous->second.bytes += block->second.bytes;
    blocks_.erase(block);
    return previous;
  }
  return block;
}

bool CachingBlocks::is_split_off(const Block& block, int64_t bytes) const {
  const auto rest = block.bytes - bytes;
  if (block.pool.is_small || settings_.expandable) {
    return rest >= kLeastRestBytes;
  }
  return bytes < settings_.max_split_bytes && rest > kSmallBytes;
}

std::optional<uint64_t> CachingBlocks::take(int64_t bytes, uint64_t stream) {
  const auto block_bytes = caching_block_bytes(bytes, settings_);
  const Wanted wanted{
      {stream, block_bytes <= kSmallBytes}, block_bytes, segment_bytes_of(block_bytes, settings_)};
  auto block = find_cached(wanted);
  if (block == blocks_.end()) {
    if (room_.allowed_bytes && settings_.garbage_collection_threshold > 0) {
      collect_garbage();
    }
    block = make_block(wanted);
    if (block == blocks_.end() && release_oversize(wanted)) {
      block = make_block(wanted);
    }
    if (block == blocks_.end()) {
      release_all();
      block = make_block(wanted);
    }
    if (block == blocks_.end()) {
      return std::nullopt;
    }
  }
  if (is_split_off(block->second, block_bytes)) {
    list(split(block, block_bytes));
  }
  block->second.state = State::live;
  now_.allocated_bytes += block->second.bytes;
  return block->first;
}

void CachingBlocks::give_back(uint64_t address, bool is_pending) {
  const auto block = blocks_.find(address);
  if (block == blocks_.end() || block->second.state != State::live) {
    return;
  }
  now_.allocated_bytes -= block->second.bytes;
  block->second.state = State::pending;
  if (!is_pending) {
    complete(address);
  }
}

void CachingBlocks::complete(uint64_t address) {
  const auto block = blocks_.find(address);
  if (block != blocks_.end() && block->second.state == State::pending) {
    block->second.state = State::cached;
    list(merge(block));
  }
}

/// Not listed any more.
CachingBlocks::At CachingBlocks::find_cached(const Wanted& wanted) {
  if (room_.allowed_bytes && settings_.garbage_collection_threshold > 0) {
    ++searches_[wanted.pool.is_small];
  }
  const auto& cached = pools_[wanted.pool].cached;
  auto found = cached.lower_bound(least_fit(wanted.bytes));
  if (!settings_.expandable) {
    while (found != cached.end() && block_of(*found)->second.is_expandable) {
      ++found;
    }
  }
  if (found == cached.end()) {
    return blocks_.end();
  }
  if (settings_.expandable) {  // a block that can grow counts as what it can grow to
    const auto grown_bytes = [&](At block) {
      const auto next = after(block);
      const bool grows = next != blocks_.end() && next->second.state == State::unmapped;
      return block->second.bytes + (grows ? next->second.bytes : 0);
    };
    for (auto next = std::next(found);
         next != cached.end() && block_of(*found)->second.is_expandable &&
         grown_bytes(block_of(*next)) < grown_bytes(block_of(*found));
         ++next) {
      found = next;
    }
  }
  const auto block = block_of(*found);
  const auto limit = settings_.max_split_bytes;
  const bool is_oversize =
      wanted.bytes < limit
          ? block->second.bytes >= limit
          : block->second.bytes >= wanted.bytes + settings_.max_unsplit_excess_bytes;
  if (is_oversize) {
    return blocks_.end();
  }
  unlist(block);
  return block;
}

/// Not listed; end() where there is no room.
CachingBlocks::At CachingBlocks::make_block(const Wanted& wanted) {
  if (room_.allowed_bytes && now_.reserved_bytes + wanted.segment_bytes > *room_.allowed_bytes) {
    return blocks_.end();
  }
  return settings_.expandable ? make_expandable(wanted) : make_segment(wanted);
}

CachingBlocks::At CachingBlocks::make_segment(const Wanted& wanted) {
  if (wanted.segment_bytes > room_.free_bytes) {
    return blocks_.end();
  }
  const auto address = behind_all_;
  behind_all_ += static_cast<uint64_t>(wanted.segment_bytes);
  room_.free_bytes -= wanted.segment_bytes;
  now_.reserved_bytes += wanted.segment_bytes;
  return blocks_
      .emplace(address,
               Block{wanted.pool, address, ++newest_, wanted.segment_bytes, false, State::cached})
      .first;
}

}  // namespace brimful::memory
