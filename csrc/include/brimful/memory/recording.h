#pragma once
#include <brimful/export.h>
#include <brimful/memory/categories.h>
#include <brimful/memory/live_table.h>
#include <brimful/memory/origin.h>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

/// What the memory of all devices did, event by event: kept in a ring, saved in a file, read by probes/memory_report.h.
namespace brimful::memory {

struct RecordedBlock {
  uint64_t address = 0;
  int64_t bytes = 0;
  int64_t step = 0;     ///< of its birth
  uint32_t site = 0;    ///< index in Recording::sites
  uint32_t module = 0;  ///< the same
  Phase phase = Phase::other;
  Category category =
      Category::other;  ///< activations that outlive their step are other from then on
};

enum class EventKind : uint8_t { birth, death, step };

struct RecordedEvent {
  int64_t time_ns = 0;  ///< since the recording began
  EventKind kind = EventKind::birth;
  uint32_t block =
      0;  ///< index in DeviceRecording::blocks; of a step: the number of the one that begins
  int64_t untracked_bytes = 0;  ///< in use from here on, beside the blocks: from before tracking
};

struct DeviceRecording {
  std::string device = "cpu";
  int64_t lost_events = 0;  ///< older than the first of `events`: the ring was full
  int64_t peak_bytes =
      0;  ///< the most in use since tracking began, or reset_peak: also while events were lost
  size_t standing_blocks = 0;  ///< so many of `blocks`, the first, lived before the first event
  std::vector<RecordedBlock> blocks;
  int64_t first_step = 0;       ///< before the first event
  int64_t untracked_bytes = 0;  ///< in use before the first event, beside the blocks
  CategoryBytes labelled{};     ///< how many of untracked_bytes are of which category
  std::vector<RecordedEvent> events;
};

struct Recording {
  int rank = 0;
  int ranks = 1;
  Origin origin;  ///< when it began
  int64_t duration_ns = 0;
  std::vector<Site> sites;  ///< the first is that of what no line is known for
  std::vector<DeviceRecording> devices;
  std::string path;  ///< of the file that it was read from
};

/// Room for 1.4 million events.
constexpr int64_t kRingBytes = int64_t{64} << 20;

/// Keeps each birth and death of a block from now on, of all threads, in a ring of `ring_bytes` for each device in use;
/// the oldest make room when it is full. Starts tracking where it is off. An event costs tens of nanoseconds.
/// In the child of a fork nothing is recorded.
/// @throws c10::Error if memory is recorded already; c10::ValueError for a ring of less than 64 KiB
BRIMFUL_API void start_recording(int64_t ring_bytes = kRingBytes);

/// Ends it, and tracking too if start_recording began that. Blocks that live now have their labels' categories
/// (categories.h), also where they are of before the recording. Rank and ranks are the variables RANK and WORLD_SIZE.
/// @throws c10::Error if memory is not recorded
BRIMFUL_API Recording stop_recording(const std::vector<Label>& labels = {});
BRIMFUL_API bool recording() noexcept;

/// About 10 bytes an event.
/// @throws std::system_error where the file cannot be written
BRIMFUL_API void save_recording(const Recording& recording, const std::string& path);
/// @throws std::system_error where the file cannot be read; c10::ValueError where it is no recording, or not whole
BRIMFUL_API Recording load_recording(const std::string& path);

/// The name of a rank's file: "{rank}" is replaced by the rank; without it, where there are several ranks, the rank comes
/// in front of the suffix ("memory.brimful", "memory.rank1.brimful").
BRIMFUL_API std::string path_of_rank(const std::string& path, int rank, int ranks);

/// As save_recording, at path_of_rank. Where that file cannot be written, one in the folder of temporary files is, and a
/// warning names it. Returns the path; an empty one where neither could be written. Never throws.
BRIMFUL_API std::string save_recording_anywhere(const Recording& recording,
                                                const std::string& path) noexcept;

/// Records while it lives, and saves at its end by save_recording_anywhere.
class BRIMFUL_API RecordScope {
 public:
  explicit RecordScope(std::string path, int64_t ring_bytes = kRingBytes);
  ~RecordScope();
  RecordScope(const RecordScope&) = delete;
  RecordScope& operator=(const RecordScope&) = delete;
  /// What is known of blocks that live at the end (see stop_recording).
  void label(std::vector<Label> labels) { labels_ = std::move(labels); }

 private:
  std::string path_;
  std::vector<Label> labels_;
};

}  // namespace brimful::memory
