#include "memory/recorded_device.h"
#include <algorithm>
#include <limits>
#include <optional>
#include <utility>
#include "memory/block_category.h"

namespace brimful::memory {
namespace {

constexpr uint32_t kNoBlock = std::numeric_limits<uint32_t>::max();

Block block_of(const Event& event) {
  Block block;
  block.data = event.data;
  block.bytes = event.bytes;
  block.step = event.step;
  block.site = event.site;
  block.module = event.module;
  block.phase = static_cast<Phase>(event.phase);
  block.category = static_cast<uint8_t>(event.category);
  return block;
}

class Builder {
 public:
  Builder(const EventRing& ring, const RingEnd& end, const std::vector<Label>& labels)
      : ring_(ring), end_(end), labels_(by_data(labels)) {
    for (size_t i = 0; i < ring.size(); ++i) {
      lives_ += ring[i].kind == Event::kStep ? 0 : 1;
    }
    first_number_ = static_cast<uint32_t>(end.last_event - lives_ + 1);
    block_of_number_.assign(lives_, kNoBlock);
  }

  DeviceRecording build(int64_t began_ns) {
    device_.lost_events = static_cast<int64_t>(ring_.lost());
    add_standing();
    add_born();
    set_lasting();
    add_events(began_ns);
    return std::move(device_);
  }

 private:
  /// Births and deaths are numbered without a gap: those that are kept are the newest.
  bool is_kept(uint32_t birth) const { return birth - first_number_ < lives_; }
  uint32_t& block_of_birth(uint32_t birth) { return block_of_number_[birth - first_number_]; }

  uint32_t add(const Block& block, bool lives, bool temporary) {
    const Category category = category_of({block, lives ? 1U : 0U, temporary}, block.step, labels_);
    device_.blocks.push_back({reinterpret_cast<uintptr_t>(block.data), block.bytes, block.step,
                              block.site, block.module, block.phase, category});
    return static_cast<uint32_t>(device_.blocks.size() - 1);
  }

  void add_standing() {
    for (const Block& block : end_.live) {
      if (!is_kept(static_cast<uint32_t>(block.birth))) {
        tracked_bytes_ += block.bytes;
        add(block, true, false);
      }
    }
    for (size_t i = 0; i < ring_.size(); ++i) {
      const Event& event = ring_[i];
      if (event.kind == Event::kDeath && !is_kept(event.birth)) {
        tracked_bytes_ += event.bytes;
        standing_.push_back(add(block_of(event), false, event.temporary != 0));
      }
    }
    device_.standing_blocks = device_.blocks.size();
  }

  void add_born() {
    for (size_t i = 0; i < ring_.size(); ++i) {
      if (const Event& event = ring_[i]; event.kind == Event::kBirth) {
        block_of_birth(event.birth) = add(block_of(event), false, false);
      }
    }
  }

  /// Those that live have labels, and those that died may have been temporary.
  void set_lasting() {
    for (const Block& block : end_.live) {
      if (const auto birth = static_cast<uint32_t>(block.birth); is_kept(birth)) {
        device_.blocks[block_of_birth(birth)].category =
            category_of({block, 1, false}, block.step, labels_);
      }
    }
    for (size_t i = 0; i < ring_.size(); ++i) {
      if (const Event& event = ring_[i]; event.kind == Event::kDeath && is_kept(event.birth)) {
        device_.blocks[block_of_birth(event.birth)].category =
            category_of({block_of(event), 0, event.temporary != 0}, event.step, {});
      }
    }
  }

  void add_events(int64_t began_ns) {
    std::optional<int64_t> first_untracked;
    std::optional<int64_t> first_step;
    size_t next_standing = 0;
    int64_t untracked = end_.used_bytes - sum_of_live();
    for (size_t i = 0; i < ring_.size(); ++i) {
      const Event& event = ring_[i];
      RecordedEvent& added = device_.events.emplace_back();
      added.time_ns = event.time_ns - began_ns;
      if (event.kind == Event::kStep) {
        added.kind = EventKind::step;
        added.block = event.step;
        first_step = first_step.value_or(int64_t{event.step} - 1);
      } else if (event.kind == Event::kBirth) {
        tracked_bytes_ += event.bytes;
        added.block = block_of_birth(event.birth);
        untracked = event.used_bytes - tracked_bytes_;
        first_untracked = first_untracked.value_or(untracked);
        device_.peak_bytes = std::max(device_.peak_bytes, event.used_bytes);
      } else {
        tracked_bytes_ -= event.bytes;
        added.kind = EventKind::death;
        added.block =
            is_kept(event.birth) ? block_of_birth(event.birth) : standing_[next_standing++];
      }
      added.untracked_bytes = untracked;
    }
    device_.untracked_bytes = first_untracked.value_or(untracked);
    for (auto& event : device_.events) {  // before the first birth nothing says
      if (event.kind == EventKind::birth) {
        break;
      }
      event.untracked_bytes = device_.untracked_bytes;
    }
    device_.first_step = first_step.value_or(end_.step);
  }

  int64_t sum_of_live() const {
    int64_t sum = 0;
    for (const Block& block : end_.live) {
      sum += block.bytes;
    }
    return sum;
  }

  const EventRing& ring_;
  const RingEnd& end_;
  const Labels labels_;
  DeviceRecording device_;
  size_t lives_ = 0;  // births and deaths in the ring
  uint32_t first_number_ = 0;
  std::vector<uint32_t> block_of_number_;
  std::vector<uint32_t> standing_;  // those that die, in the order of their deaths
  int64_t tracked_bytes_ = 0;
};

}  // namespace

DeviceRecording recorded_device(const EventRing& ring, const RingEnd& end,
                                const std::vector<Label>& labels, int64_t began_ns) {
  DeviceRecording device = Builder(ring, end, labels).build(began_ns);
  int64_t least = device.untracked_bytes;
  for (const auto& event : device.events) {
    least = std::min(least, event.untracked_bytes);
  }
  share_out_before(device.labelled, std::max<int64_t>(least, 0), labels, end.live);
  of(device.labelled, Category::other) = 0;
  return device;
}

}  // namespace brimful::memory
