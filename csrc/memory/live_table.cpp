#include <brimful/log.h>
#include <brimful/memory/live_table.h>
#include <brimful/memory/recording.h>
#include <brimful/memory/stats.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <span>
#include "memory/cpu_allocator.h"
#include "memory/cuda.h"
#include "memory/most_bytes_first.h"
#include "memory/recorder.h"
#include "memory/sites.h"
#include "memory/tracker.h"

namespace brimful::memory {
namespace {

constexpr size_t kTables = 1 + size_t{std::numeric_limits<c10::DeviceIndex>::max()} + 1;

struct Tracker {
  std::mutex following;  // taken before all others, and waited for only by a fork and at the exit
  std::atomic<uint32_t> session_followed{0};
  std::mutex mutex;  // of starts and stops; taken before those of the tables
  std::atomic<uint32_t> session{0};
  std::array<BlockTable, kTables> tables;
  std::atomic<size_t> asked_for{1};  // the tables before this one; no thread locks another
  size_t locked_over_fork = 0;
};

Tracker& tracker() {
  static auto* const the_tracker = new Tracker;  // for ever: memory is freed until the end
  return *the_tracker;
}

std::atomic<bool> is_tracking{false};
std::atomic<bool> marked_by_hand{false};

std::span<BlockTable> tables_asked_for() {
  auto& self = tracker();
  return {self.tables.data(), self.asked_for.load(std::memory_order_acquire)};
}

std::span<BlockTable> tables_locked_over_fork() {
  return {tracker().tables.data(), tracker().locked_over_fork};
}

void before_fork() {
  tracker().following.lock();
  lock_recording();
  tracker().mutex.lock();
  tracker().locked_over_fork = tables_asked_for().size();
  for (auto& table : tables_locked_over_fork()) {
    table.mutex().lock();
  }
  lock_sites();
}

void after_fork() {
  unlock_sites();
  for (auto& table : tables_locked_over_fork()) {
    table.mutex().unlock();
  }
  tracker().mutex.unlock();
  unlock_recording();
  tracker().following.unlock();
}

/// Threads may allocate to the very end, when torch's own CUDA allocator is destroyed already: who asks it now is waited for.
void at_exit() {
  is_tracking.store(false, std::memory_order_relaxed);
  const std::lock_guard lock(tracker().following);
}

void after_fork_in_child() {
  is_tracking.store(false, std::memory_order_relaxed);
  forget_recording();
  const auto locked = tables_locked_over_fork();
  for (auto& table : locked) {
    table.forget();
  }
  // Another thread may have asked for these during the fork, and have left them half changed.
  for (auto& table : tables_asked_for().subspan(locked.size())) {
    new (&table) BlockTable;
  }
  after_fork();
}

void warn_of_cuda() noexcept {
  try {
    if (const auto refusal = cuda_refusal()) {
      log(LogLevel::warning, *refusal);
    }
  } catch (...) {  // a sink that fails must not end a step
  }
}

void end_step() {
  next_step();
  if (recording()) {
    for (auto& table : tables_asked_for()) {
      const std::lock_guard lock(table.mutex());
      table.record_step(static_cast<uint32_t>(current_step()));
    }
  }
  warn_of_cuda();
}

LiveBlock as_live_block(const Block& block) {
  return {block.data, block.bytes, block.step, block.birth, block.site, block.module, block.phase};
}

std::vector<Block> blocks_in_use_of(c10::Device device) {
  auto& table = blocks_of(checked(device));
  const std::lock_guard lock(table.mutex());
  return table.live();
}

}  // namespace

BlockTable& cpu_blocks() {
  return tracker().tables[0];
}

BlockTable& blocks_of(c10::Device device) {
  auto& self = tracker();
  const size_t k = device.is_cpu() ? 0 : 1 + static_cast<size_t>(device.index());
  size_t asked_for = self.asked_for.load(std::memory_order_acquire);
  while (asked_for <= k && !self.asked_for.compare_exchange_weak(asked_for, k + 1)) {
  }
  return self.tables[k];
}

std::vector<c10::Device> tracked_devices() {
  std::vector<c10::Device> devices;
  const auto tables = tables_asked_for();
  for (size_t k = 0; k < tables.size(); ++k) {
    auto& table = tables[k];
    const std::lock_guard lock(table.mutex());
    if (table.was_on()) {
      devices.push_back(
          k == 0 ? c10::Device(c10::DeviceType::CPU)
                 : c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(k - 1)));
    }
  }
  return devices;
}

int64_t followed_bytes(c10::Device device) {
  return device.is_cpu() ? BudgetAllocator::instance().used_bytes()
                         : cuda_followed_bytes(device.index());
}

void follow_cuda() {
  auto& self = tracker();
  const uint32_t session = self.session.load(std::memory_order_relaxed);
  if (self.session_followed.load(std::memory_order_relaxed) == session) {
    return;
  }
  // Who finds the lock taken leaves it to the other.
  const std::unique_lock lock(self.following, std::try_to_lock);
  if (lock && tracking() && self.session_followed.load(std::memory_order_relaxed) != session &&
      cuda_follow(session)) {
    self.session_followed.store(session, std::memory_order_relaxed);
  }
}

void reset_tracked_peak(c10::Device device) {
  auto& table = blocks_of(device);
  const std::lock_guard lock(table.mutex());
  if (table.is_on()) {
    table.reset_peak(followed_bytes(device));
  }
}

const char* name_of(Phase phase) {
  constexpr std::array kNames{"forward", "backward", "optimizer", "other"};
  return kNames[static_cast<size_t>(phase)];
}

void start_tracking() {
  install();
  auto& self = tracker();
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(&before_fork, &after_fork, &after_fork_in_child);
    std::atexit(&at_exit);
  });
  std::unique_lock lock(self.mutex);
  TORCH_CHECK(!tracking(),
              "memory is tracked already; use what tracks it, or call stop_tracking first");
  TORCH_CHECK(!recording(), "a recording is under way; call stop_recording first");
  self.session.fetch_add(1, std::memory_order_relaxed);
  marked_by_hand.store(false, std::memory_order_relaxed);
  begin_steps();
  {
    auto& table = cpu_blocks();
    const std::lock_guard table_lock(table.mutex());
    table.start(self.session, BudgetAllocator::instance().used_bytes(), nullptr);
  }
  is_tracking.store(true, std::memory_order_release);
  lock.unlock();
  follow_cuda();
  warn_of_cuda();
}

void stop_tracking() {
  const std::lock_guard lock(tracker().mutex);
  is_tracking.store(false, std::memory_order_release);
  for (auto& table : tables_asked_for()) {
    const std::lock_guard table_lock(table.mutex());
    table.stop();
  }
}

bool tracking() noexcept {
  return is_tracking.load(std::memory_order_relaxed);
}

void mark_step() {
  marked_by_hand.store(true, std::memory_order_relaxed);
  end_step();
}

void mark_step_unless_by_hand() {
  if (!marked_by_hand.load(std::memory_order_relaxed)) {
    end_step();
  }
}

std::vector<LiveBlock> live_blocks(c10::Device device) {
  const auto live = blocks_in_use_of(device);
  std::vector<LiveBlock> blocks;
  blocks.reserve(live.size());
  std::transform(live.begin(), live.end(), std::back_inserter(blocks), &as_live_block);
  return blocks;
}

std::vector<LiveBlock> live_blocks_everywhere() {
  std::vector<LiveBlock> blocks;
  for (auto& table : tables_asked_for()) {
    const std::lock_guard lock(table.mutex());
    const auto live = table.live();
    std::transform(live.begin(), live.end(), std::back_inserter(blocks), &as_live_block);
  }
  return blocks;
}

std::optional<LiveBlock> find_block(const void* data, c10::Device device) {
  for (const Block& block : blocks_in_use_of(device)) {
    if (block.data == data) {
      return as_live_block(block);
    }
  }
  return std::nullopt;
}

std::vector<SiteUse> live_by_site(c10::Device device) {
  std::map<std::pair<uint32_t, Phase>, SiteUse> uses;
  for (const Block& block : blocks_in_use_of(device)) {
    SiteUse& use = uses[{block.site, block.phase}];
    use.site = block.site;
    use.phase = block.phase;
    use.bytes += block.bytes;
    ++use.blocks;
    if (use.born.empty() || use.born.back().first != block.step) {
      use.born.emplace_back(block.step, 0);
    }
    ++use.born.back().second;
  }
  return most_bytes_first(uses);
}

TrackingCounts tracking_counts(c10::Device device) {
  auto& table = blocks_of(checked(device));
  const std::lock_guard lock(table.mutex());
  return table.counts();
}

}  // namespace brimful::memory
