#pragma once
#include <brimful/export.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// How a caching allocator's memory is cut up. Pure functions on plain data; from any thread.
namespace brimful::probes {

struct ArenaBlock {
  int64_t bytes = 0;
  bool live = false;           ///< a tensor, or a stream, still needs it
  const void* data = nullptr;  ///< first byte
};

/// What was taken from the driver in one piece, its blocks in the order of their addresses.
struct ArenaSegment {
  std::vector<ArenaBlock> blocks;
  bool expandable = false;
};

/// A live block whose end would make room.
struct SplittingBlock {
  ArenaBlock block;
  int64_t room_bytes = 0;  ///< what would lie free in one piece: the block and its free neighbours
  std::string
      place;  ///< "train.py:31 (step)": whose block it is; empty where it was not looked for, or it is not tracked
};

struct Fragmentation {
  int64_t free_bytes = 0;  ///< of all segments
  int64_t largest_free_bytes = 0;
  double share = 0;  ///< of the free bytes, that which lies outside the largest free block: 0 to 1
  bool expandable = false;  ///< some segment is
  /// The smallest one that stands between the request and its room; nothing where no single one does, or where the
  /// request fits as it is.
  std::optional<SplittingBlock> splitter;
};

/// @throws c10::ValueError if `request_bytes` is negative
BRIMFUL_API Fragmentation fragmentation(const std::vector<ArenaSegment>& segments,
                                        int64_t request_bytes);

}  // namespace brimful::probes
