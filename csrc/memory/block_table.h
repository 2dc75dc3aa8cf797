#pragma once
#include <brimful/memory/live_table.h>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>
#include "memory/event_ring.h"
#include "memory/moment.h"

namespace brimful::memory {

struct Block {
  const void* data = nullptr;
  int64_t bytes = 0;
  uint64_t birth = 0;  // 0: the slot is free
  uint32_t step = 0;
  uint32_t backwards = 0;
  uint32_t site = kNoSite;
  uint32_t module = kNoSite;
  Phase phase = Phase::other;
  uint8_t category = kNoCategory;
};

/// How a block's owner finds it again: the CPU's lies in the block's header. Slot 0 is none.
struct Ticket {
  uint32_t slot = 0;
  uint32_t session = 0;
};

/// A block that lived at the peak.
struct PeakBlock {
  Block block;
  uint32_t slot = 0;       // where it lives; 0: freed
  bool temporary = false;  // freed in the phase in which it was born
};

struct PeakMoment {
  int64_t used_bytes = 0;
  int64_t tracked_bytes = 0;
  uint64_t event = 0;
  uint32_t step = 0;
  Phase phase = Phase::other;
};

/// Whether a block that is freed now lived within one phase only.
bool is_temporary(const Block& block, const Moment& death);

/// The blocks of one device, and those of the peak that were freed since: together all that lived at the peak.
/// One lock: the order of events is that of the device's count, or the peak's parts could not add up.
class BlockTable {
 public:
  std::mutex& mutex() { return mutex_; }

  // All of the following need the mutex.
  void start(uint32_t session, int64_t used_bytes, std::unique_ptr<EventRing> ring);
  void stop();
  /// As if nothing had ever been in it.
  void forget();

  Ticket born(const Moment& moment, int64_t bytes, int64_t used_bytes, const void* data);
  /// Whether it is of this session, and of the peak or recorded: only then its death's moment is of use.
  bool wants_moment_of_death(Ticket ticket) const;
  /// False where the ticket is of another session.
  bool died(Ticket ticket, const Moment& moment);
  void reset_peak(int64_t used_bytes);

  /// What happens from now on goes into the ring, until it is taken away; a stop leaves it.
  void record(std::unique_ptr<EventRing> ring) { ring_ = std::move(ring); }
  std::unique_ptr<EventRing> stop_recording() { return std::move(ring_); }
  void record_step(uint32_t step);

  bool is_on() const { return session_ != 0; }
  uint32_t session() const { return session_; }
  const PeakMoment& peak() const { return peak_; }
  bool was_on() const { return was_on_; }
  TrackingCounts counts() const { return {static_cast<int64_t>(events_), births_, unsited_}; }
  /// The oldest first.
  std::vector<Block> live() const;
  /// The same, or what lived when it was stopped.
  std::vector<Block> live_or_last() const { return is_on() ? live() : last_live_; }
  std::vector<PeakBlock> peak_blocks() const;
  int64_t tracked_bytes() const { return tracked_bytes_; }

 private:
  static constexpr uint32_t kChunk = 512;

  Block& at(uint32_t slot) { return chunks_[slot / kChunk][slot % kChunk]; }
  const Block& at(uint32_t slot) const { return chunks_[slot / kChunk][slot % kChunk]; }
  bool is_mine(Ticket ticket) const { return ticket.slot != 0 && ticket.session == session_; }
  uint32_t take_slot();
  void give_slot(uint32_t slot);
  void record_death(const Block& block, bool temporary);

  std::mutex mutex_;
  uint32_t session_ = 0;
  bool was_on_ = false;
  int64_t tracked_bytes_ = 0;
  uint64_t events_ = 0;
  int64_t births_ = 0;
  int64_t unsited_ = 0;
  PeakMoment peak_;
  std::vector<PeakBlock> freed_since_peak_;  // no more than lived at the peak
  std::vector<PeakBlock> last_peak_blocks_;  // when it was stopped
  std::vector<Block> last_live_;

  std::vector<std::unique_ptr<Block[]>> chunks_;
  uint32_t slots_ = 0;
  uint32_t free_slot_ = 0;  // the first of a chain through Block::site

  std::unique_ptr<EventRing> ring_;  // while memory is recorded
};

}  // namespace brimful::memory
