#include <brimful/probes/fragmentation.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace brimful::probes {
namespace {

/// Neighbouring free blocks are one.
std::vector<ArenaBlock> merged(const std::vector<ArenaBlock>& blocks) {
  std::vector<ArenaBlock> found;
  for (const ArenaBlock& block : blocks) {
    if (!block.live && !found.empty() && !found.back().live) {
      found.back().bytes += block.bytes;
    } else {
      found.push_back(block);
    }
  }
  return found;
}

int64_t free_bytes_at(const std::vector<ArenaBlock>& blocks, size_t index) {
  return index < blocks.size() && !blocks[index].live ? blocks[index].bytes : 0;
}

}  // namespace

Fragmentation fragmentation(const std::vector<ArenaSegment>& segments, int64_t request_bytes) {
  TORCH_CHECK_VALUE(request_bytes >= 0, "a request is not negative (request_bytes: ", request_bytes,
                    ")");
  Fragmentation found;
  for (const ArenaSegment& segment : segments) {
    found.expandable |= segment.expandable;
    const auto blocks = merged(segment.blocks);
    for (size_t k = 0; k < blocks.size(); ++k) {
      if (!blocks[k].live) {
        found.free_bytes += blocks[k].bytes;
        found.largest_free_bytes = std::max(found.largest_free_bytes, blocks[k].bytes);
        continue;
      }
      const int64_t beside =
          (k > 0 ? free_bytes_at(blocks, k - 1) : 0) + free_bytes_at(blocks, k + 1);
      const int64_t room = beside + blocks[k].bytes;
      const bool smaller = !found.splitter || blocks[k].bytes < found.splitter->block.bytes;
      if (beside > 0 && room >= request_bytes && smaller) {
        found.splitter = SplittingBlock{blocks[k], room, {}};
      }
    }
  }
  if (found.largest_free_bytes >= request_bytes) {
    found.splitter.reset();
  }
  if (found.free_bytes > 0) {
    found.share =
        1 - static_cast<double>(found.largest_free_bytes) / static_cast<double>(found.free_bytes);
  }
  return found;
}

}  // namespace brimful::probes
