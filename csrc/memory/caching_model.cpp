#include "memory/caching_model.h"
#include <algorithm>
#include <bit>
#include <iterator>
#include <unordered_map>
#include "memory/caching_pool.h"

namespace brimful::memory {
namespace {

constexpr int64_t kBlockBytes = 512;

int64_t divisions_of(int64_t bytes, const CachingSettings& settings) {
  if (settings.power2_divisions.empty()) {
    return 0;
  }
  constexpr auto kFirst = static_cast<int64_t>(std::bit_width(uint64_t{kMiB}));
  const auto steps = static_cast<int64_t>(std::bit_width(static_cast<uint64_t>(bytes))) - kFirst;
  const auto last = std::ssize(settings.power2_divisions) - 1;
  return settings.power2_divisions[static_cast<size_t>(std::clamp<int64_t>(steps, 0, last))];
}

/// The names that requests have for blocks, and where those are.
class NamedBlocks {
 public:
  explicit NamedBlocks(const std::vector<CachingSegment>& pool) {
    for (const auto& segment : pool) {
      uint64_t address = segment.address;
      for (const auto& block : segment.blocks) {
        if (block.state != CachingBlock::State::cached && !segment.is_private) {
          addresses_[address] = address;
        }
        address += static_cast<uint64_t>(block.bytes);
      }
    }
  }

  /// False where memory has run out.
  bool apply(const CachingRequest& request, CachingBlocks& blocks) {
    if (request.kind == CachingRequest::Kind::take) {
      const auto address = blocks.take(request.bytes, request.stream);
      if (address) {
        addresses_[request.block] = *address;
      }
      return address.has_value();
    }
    const auto found = addresses_.find(request.block);
    if (found == addresses_.end()) {
      return true;
    }
    if (request.kind == CachingRequest::Kind::complete) {
      blocks.complete(found->second);
    } else {
      blocks.give_back(found->second, request.kind == CachingRequest::Kind::give_back_pending);
    }
    if (request.kind != CachingRequest::Kind::give_back_pending) {
      addresses_.erase(found);
    }
    return true;
  }

 private:
  std::unordered_map<uint64_t, uint64_t> addresses_;
};

}  // namespace

int64_t caching_block_bytes(int64_t bytes, const CachingSettings& settings) {
  if (bytes < kBlockBytes) {
    return kBlockBytes;
  }
  const auto divisions = divisions_of(bytes, settings);
  auto step = kBlockBytes;
  if (divisions > 1 && bytes > kBlockBytes * divisions) {
    const auto power = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes)));
    step = power / static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(divisions)));
  }
  return round_up(bytes, step);
}

int64_t give_back_block(std::vector<CachingSegment>& pool, uint64_t address) {
  constexpr auto kCached = CachingBlock::State::cached;
  for (auto& segment : pool) {
    auto at = segment.address;
    auto& blocks = segment.blocks;
    for (auto block = blocks.begin(); block != blocks.end() && at <= address; ++block) {
      if (at == address && block->state == CachingBlock::State::live && !segment.is_private) {
        const auto bytes = block->bytes;
        block->state = kCached;
        if (const auto next = std::next(block); next != blocks.end() && next->state == kCached) {
          block->bytes += next->bytes;
          blocks.erase(next);
        }
        if (block != blocks.begin() && std::prev(block)->state == kCached) {
          std::prev(block)->bytes += block->bytes;
          blocks.erase(block);
        }
        return bytes;
      }
      at += static_cast<uint64_t>(block->bytes);
    }
  }
  return 0;
}

int64_t release_cached(std::vector<CachingSegment>& pool) {
  int64_t bytes = 0;
  std::erase_if(pool, [&](const auto& segment) {
    const auto& blocks = segment.blocks;
    const bool is_cached = !segment.is_private && blocks.size() == 1 &&
                           blocks.front().state == CachingBlock::State::cached;
    bytes += is_cached ? blocks.front().bytes : 0;
    return is_cached;
  });
  return bytes;
}

CachingOutcome replay_caching(const std::vector<CachingSegment>& pool,
                              const CachingSettings& settings, const CachingRoom& room,
                              const std::vector<CachingRequest>& requests,
                              std::vector<CachingMoment>* moments) {
  CachingBlocks blocks(pool, settings, room);
  NamedBlocks names(pool);
  CachingOutcome outcome;
  outcome.peak = blocks.now();
  for (size_t i = 0; i < requests.size(); ++i) {
    if (!names.apply(requests[i], blocks)) {
      outcome.ran_out = i;
      break;
    }
    const auto& now = blocks.now();
    outcome.peak.allocated_bytes = std::max(outcome.peak.allocated_bytes, now.allocated_bytes);
    outcome.peak.reserved_bytes = std::max(outcome.peak.reserved_bytes, now.reserved_bytes);
    if (moments != nullptr) {
      moments->push_back(now);
    }
  }
  outcome.releases = blocks.releases();
  return outcome;
}

}  // namespace brimful::memory
