#pragma once
#include <brimful/export.h>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>
#include "base/units.h"

/// What torch's CUDA allocator would do, as a function of plain data: no device is asked.
namespace brimful::memory {

/// Of PYTORCH_CUDA_ALLOC_CONF.
struct CachingSettings {
  int64_t max_split_bytes = std::numeric_limits<int64_t>::max();
  int64_t max_unsplit_excess_bytes =
      20 * kMiB;  ///< max_non_split_rounding_mb, of blocks that are never split
  int64_t large_segment_bytes = 20 * kMiB;
  /// roundup_power2_divisions: of requests from 1 MiB, 2 MiB, 4 MiB and so on; the last is for all beyond. Empty: none.
  std::vector<int64_t> power2_divisions = {};
  double garbage_collection_threshold = 0;
  bool expandable = false;
};

struct CachingBlock {
  /// pending: freed, but a stream still uses it; unmapped: room of an expandable segment without pages, in no snapshot.
  enum class State { cached, live, pending, unmapped };
  int64_t bytes = 0;
  State state = State::cached;
  int64_t searches = 0;  ///< for garbage collection: those since it was freed
};

/// A segment; of an expandable one a range of pages that are there.
struct CachingSegment {
  uint64_t address = 0;
  uint64_t stream = 0;
  bool is_small = false;  ///< of the pool for requests of at most 1 MiB
  bool is_expandable = false;
  bool is_private = false;  ///< of a CUDA graph or a MemPool: counted, but nothing is taken from it
  int64_t order = -1;  ///< of the segments' making: of two blocks that fit the older's is taken
  std::vector<CachingBlock> blocks = {};  ///< by address, without gaps
};

/// What the device has for the allocator.
struct CachingRoom {
  int64_t total_bytes = 0;  ///< of the device
  int64_t free_bytes = 0;   ///< as the driver has it: what other processes hold is not in it
  std::optional<int64_t> allowed_bytes = {};  ///< that segments may take in all, by a fraction
};

struct CachingRequest {
  /// give_back_pending: another stream still uses the block; `complete` when it does no longer.
  enum class Kind { take, give_back, give_back_pending, complete };
  Kind kind = Kind::take;
  uint64_t block = 0;  ///< any name while it is live; the pool's blocks have their address
  int64_t bytes = 0;   ///< as asked for; of `take` alone
  uint64_t stream = 0;
};

/// Behind a request.
struct CachingMoment {
  int64_t allocated_bytes = 0;  ///< as torch.cuda.memory_allocated
  int64_t reserved_bytes = 0;   ///< as torch.cuda.memory_reserved
};

struct CachingOutcome {
  CachingMoment peak = {};             ///< each by itself; of the beginning too
  std::optional<size_t> ran_out = {};  ///< the request for which there was no memory: the last one
  int64_t releases = 0;                ///< how often the cache was given back for a request
};

/// What a request counts as in torch.cuda.memory_allocated, if its block is split off.
BRIMFUL_API int64_t caching_block_bytes(int64_t bytes, const CachingSettings& settings);

/// As if this live block had been given back before. Returns its bytes; 0 where there is none, or it is of a private pool.
BRIMFUL_API int64_t give_back_block(std::vector<CachingSegment>& pool, uint64_t address);
/// As if the cache had been given back to the device: segments of which nothing is in use. Returns their bytes.
BRIMFUL_API int64_t release_cached(std::vector<CachingSegment>& pool);

/// Replays requests from a pool as it is. Blocks that are given back and are not known are left out. Blocks pending at the
/// beginning stay so until `complete` or until memory runs out, which waits for all streams.
/// `moments`: gets one for each request that was granted.
BRIMFUL_API CachingOutcome replay_caching(const std::vector<CachingSegment>& pool,
                                          const CachingSettings& settings, const CachingRoom& room,
                                          const std::vector<CachingRequest>& requests,
                                          std::vector<CachingMoment>* moments = nullptr);

}  // namespace brimful::memory
