// The file: magic, version, numbers of seven bits a byte (the rest of a number follows while the top bit is set), and a
// check sum of all of it. A block is written in its birth, a death says how many births ago its block's was.
#include <brimful/log.h>
#include <brimful/memory/recording.h>
#include <c10/util/Exception.h>
#include <unistd.h>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>
#include "base/environment.h"
#include "base/fnv.h"
#include "base/json.h"
#include "base/whole_file.h"

namespace brimful::memory {
namespace {

constexpr std::string_view kMagic = "brimful memory\n";
constexpr uint64_t kVersion = 2;  // 1 had no host, command and pid
constexpr size_t kSumBytes = 8;

uint64_t sum_of(std::string_view bytes) {
  Fnv<uint64_t> sum;
  sum.add(bytes);
  return sum.value();
}

class Writer {
 public:
  void number(uint64_t value) {
    for (; value >= 0x80; value >>= 7) {
      out_.push_back(static_cast<char>(value | 0x80));
    }
    out_.push_back(static_cast<char>(value));
  }
  void difference(int64_t value) {
    number(static_cast<uint64_t>(value) << 1 ^ static_cast<uint64_t>(value >> 63));
  }
  void text(const std::string& words) {
    number(words.size());
    out_ += words;
  }
  void raw(std::string_view bytes) { out_ += bytes; }
  std::string finish() {
    const uint64_t sum = sum_of(out_);
    for (size_t k = 0; k < kSumBytes; ++k) {
      out_.push_back(static_cast<char>(sum >> (8 * k)));
    }
    return std::move(out_);
  }

 private:
  std::string out_;
};

class Reader {
 public:
  Reader(std::string_view bytes, const std::string& path) : left_(bytes), path_(path) {}

  uint64_t number() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      check(!left_.empty());
      const auto byte = static_cast<uint8_t>(left_.front());
      left_.remove_prefix(1);
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) {
        return value;
      }
    }
    check(false);
    return 0;
  }
  int64_t difference() {
    const uint64_t value = number();
    return static_cast<int64_t>(value >> 1 ^ (0 - (value & 1)));
  }
  /// Of things that take a byte at least each.
  size_t count() {
    const uint64_t value = number();
    check(value <= left_.size());
    return value;
  }
  template <typename Number = uint32_t>
  Number below(uint64_t end) {
    const uint64_t value = number();
    check(value < end);
    return static_cast<Number>(value);
  }
  std::string text() {
    const size_t size = count();
    std::string words(left_.substr(0, size));
    left_.remove_prefix(size);
    return words;
  }
  void check(bool is_well) const {
    TORCH_CHECK_VALUE(is_well, "the recording is damaged (path: ", path_, "); record again");
  }

 private:
  std::string_view left_;
  const std::string& path_;
};

void write_block(Writer& out, const RecordedBlock& block, const RecordedBlock& before) {
  out.difference(static_cast<int64_t>(block.address - before.address));
  out.number(static_cast<uint64_t>(block.bytes));
  out.difference(block.step - before.step);
  out.number(block.site);
  out.number(block.module);
  out.number(static_cast<uint64_t>(block.phase) * kCategories +
             static_cast<uint64_t>(block.category));
}

RecordedBlock read_block(Reader& in, const RecordedBlock& before, size_t sites) {
  constexpr uint64_t kKinds = 4 * kCategories;  // phases
  RecordedBlock block;
  block.address = before.address + static_cast<uint64_t>(in.difference());
  block.bytes = static_cast<int64_t>(in.number() & ~(uint64_t{1} << 63));
  block.step = before.step + in.difference();
  block.site = in.below(sites);
  block.module = in.below(sites);
  const auto kind = in.below(kKinds);
  block.phase = static_cast<Phase>(kind / kCategories);
  block.category = static_cast<Category>(kind % kCategories);
  return block;
}

void write_device(Writer& out, const DeviceRecording& device) {
  out.text(device.device);
  out.difference(device.lost_events);
  out.difference(device.peak_bytes);
  out.difference(device.first_step);
  out.difference(device.untracked_bytes);
  for (const int64_t bytes : device.labelled) {
    out.difference(bytes);
  }
  out.number(device.standing_blocks);
  RecordedBlock before;
  for (size_t i = 0; i < device.standing_blocks; ++i) {
    write_block(out, device.blocks[i], before);
    before = device.blocks[i];
  }
  out.number(device.events.size());
  int64_t time_ns = 0;
  int64_t untracked_bytes = device.untracked_bytes;
  size_t born = device.standing_blocks;
  for (const RecordedEvent& event : device.events) {
    out.number(static_cast<uint64_t>(event.time_ns - time_ns) << 2 |
               static_cast<uint64_t>(event.kind));
    time_ns = event.time_ns;
    if (event.kind == EventKind::birth) {
      write_block(out, device.blocks[born], before);
      before = device.blocks[born++];
      out.difference(event.untracked_bytes - untracked_bytes);
      untracked_bytes = event.untracked_bytes;
    } else {
      out.number(event.kind == EventKind::death ? born - event.block : event.block);
    }
  }
}

/// `blocks`: how many there are before it. What a birth has more follows.
RecordedEvent read_event(Reader& in, const RecordedEvent& before, size_t blocks) {
  const uint64_t head = in.number();
  in.check((head & 3) <= static_cast<uint64_t>(EventKind::step));
  RecordedEvent event = before;
  event.kind = static_cast<EventKind>(head & 3);
  event.time_ns += static_cast<int64_t>(head >> 2);
  switch (event.kind) {
    case EventKind::birth:
      event.block = static_cast<uint32_t>(blocks);
      break;
    case EventKind::death:
      event.block = static_cast<uint32_t>(blocks - in.below<size_t>(blocks + 1));
      in.check(event.block < blocks);
      break;
    case EventKind::step:
      event.block = in.below(uint64_t{1} << 32);
      break;
  }
  return event;
}

DeviceRecording read_device(Reader& in, size_t sites) {
  DeviceRecording device;
  device.device = in.text();
  device.lost_events = in.difference();
  device.peak_bytes = in.difference();
  device.first_step = in.difference();
  device.untracked_bytes = in.difference();
  for (int64_t& bytes : device.labelled) {
    bytes = in.difference();
  }
  device.standing_blocks = in.count();
  for (size_t i = 0; i < device.standing_blocks; ++i) {
    device.blocks.push_back(read_block(in, i == 0 ? RecordedBlock{} : device.blocks.back(), sites));
  }
  device.events.resize(in.count());
  RecordedEvent before;
  before.untracked_bytes = device.untracked_bytes;
  std::vector<bool> lives(device.standing_blocks, true);
  for (RecordedEvent& event : device.events) {
    event = read_event(in, before, device.blocks.size());
    if (event.kind == EventKind::birth) {
      const auto last = device.blocks.empty() ? RecordedBlock{} : device.blocks.back();
      device.blocks.push_back(read_block(in, last, sites));
      event.untracked_bytes += in.difference();
      lives.push_back(true);
    } else if (event.kind == EventKind::death) {
      in.check(lives[event.block]);
      lives[event.block] = false;
    }
    before = event;
  }
  return device;
}

std::string to_bytes(const Recording& recording) {
  Writer out;
  out.raw(kMagic);
  out.number(kVersion);
  out.difference(recording.rank);
  out.difference(recording.ranks);
  out.difference(recording.origin.unix_ns);
  out.difference(recording.duration_ns);
  out.text(recording.origin.host);
  out.text(recording.origin.command);
  out.difference(recording.origin.pid);
  out.number(recording.sites.size());
  for (const Site& site : recording.sites) {
    out.text(valid_utf8(site.file));
    out.difference(site.line);
    out.text(valid_utf8(site.function));
  }
  out.number(recording.devices.size());
  for (const DeviceRecording& device : recording.devices) {
    write_device(out, device);
  }
  return out.finish();
}

/// What is between the head and the check sum.
std::string_view checked_content(std::string_view bytes, const std::string& path) {
  TORCH_CHECK_VALUE(bytes.starts_with(kMagic), "this is no recording of memory (path: ", path,
                    "); give a file that memory.record wrote");
  TORCH_CHECK_VALUE(bytes.size() > kMagic.size() + kSumBytes,
                    "the recording is cut off (path: ", path, ", bytes: ", bytes.size(),
                    "); record again");
  const auto content = bytes.substr(0, bytes.size() - kSumBytes);
  uint64_t sum = 0;
  for (size_t k = 0; k < kSumBytes; ++k) {
    sum |= static_cast<uint64_t>(static_cast<uint8_t>(bytes[content.size() + k])) << (8 * k);
  }
  TORCH_CHECK_VALUE(sum == sum_of(content), "the recording is cut off or damaged (path: ", path,
                    ", bytes: ", bytes.size(), "); record again");
  return content.substr(kMagic.size());
}

void warn(const std::string& words) noexcept {
  try {
    log(LogLevel::warning, words);
  } catch (...) {  // a sink that fails must not end a job
  }
}

}  // namespace

void save_recording(const Recording& recording, const std::string& path) {
  write_file(path, to_bytes(recording));
}

Recording load_recording(const std::string& path) {
  const std::string bytes = read_file(path);
  Reader in(checked_content(bytes, path), path);
  const uint64_t version = in.number();
  TORCH_CHECK_VALUE(version == 1 || version == kVersion,
                    "the recording is of another version of brimful (path: ", path,
                    ", format: ", version, ", known: ", kVersion, "); read it with that one");
  Recording recording;
  recording.path = path;
  recording.rank = static_cast<int>(in.difference());
  recording.ranks = static_cast<int>(in.difference());
  recording.origin.unix_ns = in.difference();
  recording.duration_ns = in.difference();
  if (version > 1) {
    recording.origin.host = in.text();
    recording.origin.command = in.text();
    recording.origin.pid = in.difference();
  }
  for (size_t left = in.count(); left > 0; --left) {
    Site& site = recording.sites.emplace_back();
    site.file = in.text();
    site.line = static_cast<int>(in.difference());
    site.function = in.text();
  }
  for (size_t left = in.count(); left > 0; --left) {
    recording.devices.push_back(read_device(in, recording.sites.size()));
  }
  return recording;
}

std::string save_recording_anywhere(const Recording& recording, const std::string& path) noexcept {
  try {
    auto wanted = path_of_rank(path, recording.rank, recording.ranks);
    try {
      save_recording(recording, wanted);
      return wanted;
    } catch (const std::system_error& error) {
      const auto other = temporary_folder() + "/brimful-" + std::to_string(getpid()) + "-" +
                         wanted.substr(wanted.rfind('/') + 1);
      save_recording(recording, other);
      warn(std::string("the recording of memory cannot be written (") + error.what() +
           "); it is in " + other);
      return other;
    }
  } catch (const std::exception& error) {
    warn(std::string("the recording of memory is lost: it cannot be written (") + error.what() +
         ")");
    return "";
  }
}

}  // namespace brimful::memory
