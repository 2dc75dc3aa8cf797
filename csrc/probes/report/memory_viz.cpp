// The format that torch's snapshots have. Blocks that live at the end are segments of their own, because only CUDA has
// segments; the viewer goes back from them.
#include <brimful/probes/memory_report.h>

#include <unordered_map>

#include "base/pickle.h"

namespace brimful::probes {
namespace {

using memory::DeviceRecording;
using memory::EventKind;
using memory::RecordedBlock;
using memory::Recording;

constexpr size_t kEntriesOfPart = 500;

class Snapshot {
 public:
  explicit Snapshot(const std::vector<Recording>& recordings) : recordings_(recordings) {}

  std::string pickle() {
    out_.begin_dict();
    out_.text("segments");
    out_.begin_list();
    for_each_device([this](const Recording& recording, const DeviceRecording& device) {
      write_segments(recording, device);
    });
    out_.end_list();
    out_.text("device_traces");
    out_.begin_list();
    for_each_device([this](const Recording& recording, const DeviceRecording& device) {
      write_trace(recording, device);
    });
    out_.end_list();
    out_.text("allocator_settings");
    out_.begin_dict();
    out_.end_dict();
    out_.end_dict();
    return out_.finish();
  }

 private:
  template <typename Write>
  void for_each_device(const Write& write) {
    number_ = 0;
    for (const Recording& recording : recordings_) {
      frames_.clear();
      for (const DeviceRecording& device : recording.devices) {
        write(recording, device);
        ++number_;
      }
    }
  }

  void write_segments(const Recording& recording, const DeviceRecording& device) {
    std::vector<bool> lives(device.blocks.size(), true);
    for (const auto& event : device.events) {
      if (event.kind == EventKind::death) {
        lives[event.block] = false;
      }
    }
    for (size_t k = 0; k < device.blocks.size(); ++k) {
      if (lives[k]) {
        write_segment(recording, device.blocks[k]);
        split_now_and_then();
      }
    }
  }

  void write_segment(const Recording& recording, const RecordedBlock& block) {
    out_.begin_dict();
    write_number("device", number_);
    out_.text("address");
    out_.unsigned_integer(block.address);
    for (const char* const size :
         {"total_size", "allocated_size", "active_size", "requested_size"}) {
      write_number(size, block.bytes);
    }
    write_number("stream", 0);
    write_text("segment_type", "large");
    out_.text("segment_pool_id");
    out_.begin_tuple();
    out_.integer(0);
    out_.integer(0);
    out_.end_tuple();
    out_.text("is_expandable");
    out_.boolean(false);
    write_frames(recording, block.site);
    out_.text("blocks");
    out_.begin_list();
    out_.begin_dict();
    out_.text("address");
    out_.unsigned_integer(block.address);
    write_number("size", block.bytes);
    write_number("requested_size", block.bytes);
    write_text("state", "active_allocated");
    write_frames(recording, block.site);
    out_.end_dict();
    out_.end_list();
    out_.end_dict();
  }

  void write_trace(const Recording& recording, const DeviceRecording& device) {
    out_.begin_list();
    for (const auto& event : device.events) {
      if (event.kind != EventKind::step) {
        const auto& block = device.blocks[event.block];
        const int64_t time_us = (recording.origin.unix_ns + event.time_ns) / 1000;
        if (event.kind == EventKind::birth) {
          write_entry(recording, "alloc", block, time_us);
        } else {
          write_entry(recording, "free_requested", block, time_us);
          write_entry(recording, "free_completed", block, time_us);
        }
        split_now_and_then();
      }
    }
    write_end((recording.origin.unix_ns + recording.duration_ns) / 1000);
    out_.end_list();
  }

  void write_entry(const Recording& recording, const char* action, const RecordedBlock& block,
                   int64_t time_us) {
    out_.begin_dict();
    write_text("action", action);
    out_.text("addr");
    out_.unsigned_integer(block.address);
    write_number("size", block.bytes);
    write_number("stream", 0);
    write_number("time_us", time_us);
    write_text("category", name_of(block.category));
    write_frames(recording, block.site);
    out_.end_dict();
  }

  /// The viewer fails on categories without "unknown", which the blocks of segments have there.
  void write_end(int64_t time_us) {
    out_.begin_dict();
    write_text("action", "snapshot");
    write_number("addr", 0);
    write_number("size", 0);
    write_number("stream", 0);
    write_number("time_us", time_us);
    write_text("category", "unknown");
    out_.text("frames");
    out_.begin_list();
    out_.end_list();
    out_.end_dict();
  }

  void write_frames(const Recording& recording, uint32_t number) {
    out_.text("frames");
    if (const auto found = frames_.find(number); found != frames_.end()) {
      out_.again(found->second);
      return;
    }
    const auto& site = recording.sites[number];
    out_.begin_list();
    out_.begin_dict();
    write_text("filename", site.file);
    write_number("line", site.line);
    write_text("name", number == 0 ? to_string(site) : site.function);
    out_.end_dict();
    out_.end_list();
    frames_.emplace(number, out_.keep());
  }

  void write_number(const char* key, int64_t value) {
    out_.text(key);
    out_.integer(value);
  }
  void write_text(const char* key, const std::string& text) {
    out_.text(key);
    out_.text(text);
  }

  void split_now_and_then() {
    if (++entries_ % kEntriesOfPart == 0) {
      out_.split_list();
    }
  }

  const std::vector<Recording>& recordings_;
  Pickle out_;
  std::unordered_map<uint32_t, uint32_t> frames_;  // of sites that were written, of one recording
  int64_t number_ = 0;
  size_t entries_ = 0;
};

}  // namespace

std::string to_memory_viz(const std::vector<Recording>& recordings) {
  return Snapshot(recordings).pickle();
}

}  // namespace brimful::probes
