#include "memory/block_table.h"
#include <algorithm>
#include <chrono>

namespace brimful::memory {

namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Event event_of(Event::Kind kind, const Block& block) {
  Event event{};
  event.time_ns = now_ns();
  event.data = block.data;
  event.bytes = block.bytes;
  event.birth = static_cast<uint32_t>(block.birth);
  event.step = block.step;
  event.site = block.site & 0xffffffU;
  event.category = block.category;
  event.module = block.module & 0xffffffU;
  event.phase = static_cast<uint32_t>(block.phase) & 3U;
  event.kind = kind;
  return event;
}

}  // namespace

bool is_temporary(const Block& block, const Moment& death) {
  switch (block.phase) {
    case Phase::forward:
      return block.backwards == death.backwards;
    case Phase::other:
      return death.phase == Phase::other && block.step == death.step &&
             block.backwards == death.backwards;
    default:
      return death.phase == block.phase && block.step == death.step;
  }
}

void BlockTable::start(uint32_t session, int64_t used_bytes, std::unique_ptr<EventRing> ring) {
  forget();
  ring_ = std::move(ring);
  session_ = session;
  was_on_ = true;
  reset_peak(used_bytes);
}

void BlockTable::stop() {
  if (is_on()) {
    last_peak_blocks_ = peak_blocks();
    last_live_ = live();
  }
  chunks_.clear();
  slots_ = 0;
  free_slot_ = 0;
  session_ = 0;
  tracked_bytes_ = 0;
  freed_since_peak_ = {};
}

void BlockTable::forget() {
  stop();
  last_peak_blocks_ = {};
  last_live_ = {};
  ring_ = nullptr;
  peak_ = {};
  events_ = 0;
  births_ = 0;
  unsited_ = 0;
  was_on_ = false;
}

Ticket BlockTable::born(const Moment& moment, int64_t bytes, int64_t used_bytes, const void* data) {
  if (!is_on()) {
    return {};
  }
  tracked_bytes_ += bytes;
  ++births_;
  unsited_ += moment.site == kNoSite ? 1 : 0;
  const uint32_t slot = take_slot();
  at(slot) = {data,        bytes,         ++events_,    moment.step,    moment.backwards,
              moment.site, moment.module, moment.phase, moment.category};
  if (used_bytes > peak_.used_bytes) {
    peak_ = {used_bytes, tracked_bytes_, events_, moment.step, moment.phase};
    freed_since_peak_.clear();
  }
  if (ring_) {
    Event event = event_of(Event::kBirth, at(slot));
    event.used_bytes = used_bytes;
    ring_->add(event);
  }
  return {slot, session_};
}

bool BlockTable::wants_moment_of_death(Ticket ticket) const {
  return is_mine(ticket) && (ring_ || at(ticket.slot).birth <= peak_.event);
}

bool BlockTable::died(Ticket ticket, const Moment& moment) {
  if (!is_mine(ticket)) {
    return false;
  }
  ++events_;
  const Block& block = at(ticket.slot);
  tracked_bytes_ -= block.bytes;
  if (ring_) {
    record_death(block, is_temporary(block, moment));
  }
  if (block.birth <= peak_.event) {
    freed_since_peak_.push_back({block, 0, is_temporary(block, moment)});
  }
  give_slot(ticket.slot);
  return true;
}

void BlockTable::record_death(const Block& block, bool temporary) {
  Event event = event_of(Event::kDeath, block);
  event.temporary = temporary ? 1 : 0;
  ring_->add(event);
}

void BlockTable::record_step(uint32_t step) {
  if (ring_ && is_on()) {
    Block none;
    none.step = step;
    ring_->add(event_of(Event::kStep, none));
  }
}

void BlockTable::reset_peak(int64_t used_bytes) {
  peak_ = {used_bytes, tracked_bytes_, events_, 0, Phase::other};
  freed_since_peak_.clear();
}

std::vector<Block> BlockTable::live() const {
  std::vector<Block> blocks;
  for (uint32_t slot = 1; slot < slots_; ++slot) {
    if (at(slot).birth != 0) {
      blocks.push_back(at(slot));
    }
  }
  std::sort(blocks.begin(), blocks.end(),
            [](const Block& a, const Block& b) { return a.birth < b.birth; });
  return blocks;
}

std::vector<PeakBlock> BlockTable::peak_blocks() const {
  if (!is_on()) {
    return last_peak_blocks_;
  }
  auto blocks = freed_since_peak_;
  for (uint32_t slot = 1; slot < slots_; ++slot) {
    if (at(slot).birth != 0 && at(slot).birth <= peak_.event) {
      blocks.push_back({at(slot), slot, false});
    }
  }
  return blocks;
}

uint32_t BlockTable::take_slot() {
  if (free_slot_ != 0) {
    return std::exchange(free_slot_, at(free_slot_).site);
  }
  slots_ = std::max<uint32_t>(slots_, 1);
  if (slots_ / kChunk == chunks_.size()) {
    chunks_.push_back(std::make_unique<Block[]>(kChunk));
  }
  return slots_++;
}

void BlockTable::give_slot(uint32_t slot) {
  at(slot).birth = 0;
  at(slot).site = std::exchange(free_slot_, slot);
}

}  // namespace brimful::memory
