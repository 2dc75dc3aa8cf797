#include <brimful/memory/recording.h>
#include <c10/util/Exception.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>
#include "base/environment.h"
#include "memory/block_category.h"
#include "memory/recorded_device.h"
#include "memory/recorder.h"
#include "memory/tracker.h"

namespace brimful::memory {
namespace {

constexpr int64_t kLeastRingBytes = 64 << 10;
constexpr int64_t kMostRingBytes = std::numeric_limits<uint32_t>::max() * sizeof(Event);

struct Recorder {
  std::mutex mutex;
  std::atomic<size_t> capacity{0};  // events of a ring; 0: off
  bool owns_tracking = false;
  int64_t began_ns = 0;
  int64_t began_unix_ns = 0;
};

Recorder& recorder() {
  static auto* const the_recorder = new Recorder;  // for ever: memory is freed until the end
  return *the_recorder;
}

template <typename Clock>
int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

/// In place of the process's numbers, those of the sites that the recording has.
class SiteNumbers {
 public:
  explicit SiteNumbers(std::vector<Site>& sites) : sites_(sites) { sites_.emplace_back(); }
  void renumber(uint32_t& id) {
    const auto [found, is_new] = numbers_.try_emplace(id, static_cast<uint32_t>(sites_.size()));
    if (is_new) {
      sites_.push_back(site(id));
    }
    id = found->second;
  }

 private:
  std::vector<Site>& sites_;
  std::unordered_map<uint32_t, uint32_t> numbers_{{kNoSite, 0}};
};

struct Ended {
  c10::Device device;
  std::unique_ptr<EventRing> ring;
  RingEnd end;
  int64_t peak_bytes;
};

/// The rings are taken away under the tables' locks, and read without.
std::vector<Ended> take_rings() {
  std::vector<Ended> all;
  for (const c10::Device device : tracked_devices()) {
    auto& table = blocks_of(device);
    const std::lock_guard lock(table.mutex());
    if (auto ring = table.stop_recording()) {
      const auto events = static_cast<uint64_t>(table.counts().events);
      all.push_back({device,
                     std::move(ring),
                     {table.live_or_last(), events, followed_bytes(device), current_step()},
                     table.peak().used_bytes});
    }
  }
  return all;
}

}  // namespace

std::unique_ptr<EventRing> new_ring() noexcept {
  const size_t capacity = recorder().capacity.load(std::memory_order_relaxed);
  try {
    return capacity > 0 ? std::make_unique<EventRing>(capacity) : nullptr;
  } catch (...) {
    return nullptr;
  }
}

void lock_recording() {
  recorder().mutex.lock();
}

void unlock_recording() {
  recorder().mutex.unlock();
}

void forget_recording() noexcept {
  recorder().capacity.store(0, std::memory_order_relaxed);
}

bool recording() noexcept {
  return recorder().capacity.load(std::memory_order_relaxed) > 0;
}

void start_recording(int64_t ring_bytes) {
  TORCH_CHECK_VALUE(ring_bytes >= kLeastRingBytes && ring_bytes <= kMostRingBytes,
                    "a ring must have room for some thousand events (ring_bytes: ", ring_bytes,
                    ", least: ", kLeastRingBytes, ", most: ", kMostRingBytes, ")");
  auto& self = recorder();
  const std::lock_guard lock(self.mutex);
  TORCH_CHECK(!recording(), "memory is recorded already; stop that recording first");
  self.owns_tracking = !tracking();
  if (self.owns_tracking) {
    start_tracking();
  }
  self.began_ns = now_ns<std::chrono::steady_clock>();
  self.began_unix_ns = now_ns<std::chrono::system_clock>();
  const size_t capacity = static_cast<size_t>(ring_bytes) / sizeof(Event);
  self.capacity.store(capacity, std::memory_order_relaxed);
  try {
    for (const c10::Device device : tracked_devices()) {
      auto ring = std::make_unique<EventRing>(capacity);
      auto& table = blocks_of(device);
      const std::lock_guard table_lock(table.mutex());
      if (table.is_on()) {
        table.record(std::move(ring));
      }
    }
  } catch (...) {
    self.capacity.store(0, std::memory_order_relaxed);
    take_rings();
    if (self.owns_tracking) {
      stop_tracking();
    }
    throw;
  }
}

Recording stop_recording(const std::vector<Label>& labels) {
  auto& self = recorder();
  const std::lock_guard lock(self.mutex);
  TORCH_CHECK(recording(), "memory is not recorded; call start_recording first");
  self.capacity.store(0, std::memory_order_relaxed);
  const auto ended = take_rings();
  Recording recording;
  recording.rank = static_cast<int>(environment_number("RANK", 0));
  recording.ranks = static_cast<int>(environment_number("WORLD_SIZE", 1));
  recording.origin = origin_now();
  recording.origin.unix_ns = self.began_unix_ns;
  recording.duration_ns = now_ns<std::chrono::steady_clock>() - self.began_ns;
  if (self.owns_tracking) {
    stop_tracking();
  }
  SiteNumbers numbers(recording.sites);
  for (const auto& [device, ring, end, peak_bytes] : ended) {
    auto& made = recording.devices.emplace_back(
        recorded_device(*ring, end, with_workspaces(labels, device), self.began_ns));
    made.device = device.str();
    made.peak_bytes = std::max(made.peak_bytes, peak_bytes);
    for (auto& block : made.blocks) {
      numbers.renumber(block.site);
      numbers.renumber(block.module);
    }
  }
  return recording;
}

std::string path_of_rank(const std::string& path, int rank, int ranks) {
  constexpr std::string_view kPlace = "{rank}";
  const std::string number = std::to_string(rank);
  std::string named = path;
  auto at = named.find(kPlace);
  if (at == std::string::npos && ranks > 1) {
    const auto slash = path.rfind('/') + 1;  // 0 without one
    const auto dot = path.rfind('.');
    named.insert(dot == std::string::npos || dot <= slash ? path.size() : dot, ".rank" + number);
  }
  for (; at != std::string::npos; at = named.find(kPlace)) {
    named.replace(at, kPlace.size(), number);
  }
  return named;
}

RecordScope::RecordScope(std::string path, int64_t ring_bytes) : path_(std::move(path)) {
  start_recording(ring_bytes);
}

RecordScope::~RecordScope() {
  try {
    if (recording()) {  // not in the child of a fork
      save_recording_anywhere(stop_recording(labels_), path_);
    }
  } catch (...) {  // ended by another thread meanwhile
  }
}

}  // namespace brimful::memory
