#pragma once
#include <map>
#include <set>
#include <tuple>
#include "memory/caching_model.h"

namespace brimful::memory {

/// The blocks of a device in the order of their addresses: torch's rules of which is taken, split, merged and given back.
class CachingBlocks {
 public:
  CachingBlocks(const std::vector<CachingSegment>& segments, const CachingSettings& settings,
                const CachingRoom& room);

  /// The block's address; nothing: memory has run out, and all that could be given back to the device has been.
  std::optional<uint64_t> take(int64_t bytes, uint64_t stream);
  void give_back(uint64_t address, bool is_pending);
  void complete(uint64_t address);

  const CachingMoment& now() const { return now_; }
  int64_t releases() const { return releases_; }

 private:
  using State = CachingBlock::State;
  /// Blocks serve requests of one stream and of one kind of size.
  struct PoolKey {
    uint64_t stream;
    bool is_small;
    bool operator<(const PoolKey& other) const {
      return std::tie(stream, is_small) < std::tie(other.stream, other.is_small);
    }
  };
  struct Block {
    PoolKey pool;
    uint64_t segment;  // its address: blocks of one segment are neighbours
    int64_t order;     // the segment's
    int64_t bytes;
    bool is_expandable;
    State state;
    int64_t cached_at = 0;  // in searches
  };
  /// Bytes, the segment's order, and the address: the best fit is the first.
  using Fit = std::tuple<int64_t, int64_t, uint64_t>;
  struct Pool {
    std::set<Fit> cached;
    std::set<uint64_t> unmapped;
  };
  using Blocks = std::map<uint64_t, Block>;
  using At = Blocks::iterator;
  struct Wanted {
    PoolKey pool;
    int64_t bytes;          // of the block
    int64_t segment_bytes;  // if a segment must be made
  };

  void add_segment(const CachingSegment& segment);
  void add_unmapped_gaps();
  At find_cached(const Wanted& wanted);
  At make_block(const Wanted& wanted);
  At make_segment(const Wanted& wanted);
  bool is_split_off(const Block& block, int64_t bytes) const;

  At before(At block);  // in its segment; end() where there is none
  At after(At block);
  bool is_whole(At block) {
    return before(block) == blocks_.end() && after(block) == blocks_.end();
  }
  static Fit fit_of(At block) { return {block->second.bytes, block->second.order, block->first}; }
  static Fit least_fit(int64_t bytes) { return {bytes, std::numeric_limits<int64_t>::min(), 0}; }
  At block_of(const Fit& fit) { return blocks_.find(std::get<2>(fit)); }
  /// Of a block in its pool's lists.
  void list(At block);
  void unlist(At block);
  /// Makes two of it; the first keeps `bytes`. Neither is listed.
  At split(At block, int64_t bytes);
  /// With its neighbours of the same state, which are listed; the whole is not.
  At merge(At block);

  bool release_oversize(const Wanted& wanted);
  void release_all();
  void release(At block);
  void collect_garbage();

  int64_t page_bytes(const PoolKey& pool) const;
  At make_expandable(const Wanted& wanted);
  At find_address_space(const Wanted& wanted);
  At map(At block, int64_t bytes);
  void unmap(At block);

  Blocks blocks_;
  std::map<PoolKey, Pool> pools_;
  CachingSettings settings_;
  CachingRoom room_;
  CachingMoment now_;
  uint64_t behind_all_ = uint64_t{1} << 40;
  int64_t newest_ = 0;  // segment, in their order
  int64_t releases_ = 0;
  std::map<bool, int64_t> searches_;  // by is_small
};

}  // namespace brimful::memory
