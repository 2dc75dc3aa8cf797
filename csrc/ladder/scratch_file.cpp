#include "ladder/scratch_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/format.h"

namespace brimful::ladder {
namespace {
constexpr int64_t kPage = 4096;
constexpr unsigned kTmpfs = 0x01021994;
constexpr unsigned kRamfs = 0x858458f6;

std::atomic<int64_t> bytes_per_s{0};

int64_t in_pages(int64_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

std::string reason(int error) {
  return std::strerror(error);  // NOLINT(concurrency-mt-unsafe): glibc's is
}

/// As a program expects errors of its disk: Python has an OSError of it.
[[noreturn]] void throw_disk_error(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

bool is_memory(const std::string& directory) {
  struct statfs found {};
  return statfs(directory.c_str(), &found) == 0 && (static_cast<unsigned>(found.f_type) == kTmpfs ||
                                                    static_cast<unsigned>(found.f_type) == kRamfs);
}

std::vector<std::string> directories_to_try(const std::string& directory) {
  if (!directory.empty()) {
    return {directory};
  }
  const auto value_of = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  if (auto chosen = value_of("BRIMFUL_SCRATCH_DIR"); !chosen.empty()) {
    return {std::move(chosen)};
  }
  std::vector<std::string> all;
  if (auto usual = value_of("TMPDIR"); !usual.empty()) {
    all.push_back(std::move(usual));
  }
  all.insert(all.end(), {"/var/tmp", "/tmp"});
  return all;
}

/// A throttled disk, from here on.
class Throttle {
 public:
  explicit Throttle(int64_t bytes) : bytes_(bytes) {}
  ~Throttle() {
    if (const auto rate = bytes_per_s.load(); rate > 0) {
      const std::chrono::duration<double> least(static_cast<double>(bytes_) /
                                                static_cast<double>(rate));
      std::this_thread::sleep_until(began_ + std::chrono::duration_cast<Clock::duration>(least));
    }
  }
  Throttle(const Throttle&) = delete;
  Throttle& operator=(const Throttle&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  int64_t bytes_;
  Clock::time_point began_ = Clock::now();
};

struct Mapping {
  std::shared_ptr<const ScratchFile::Part> part;
  void* data;
};

void unmap(void* context) {
  const std::unique_ptr<Mapping> mapping(static_cast<Mapping*>(context));
  munmap(mapping->data, static_cast<size_t>(in_pages(mapping->part->bytes())));
}

struct OwnMapping {
  void* data;
  size_t bytes;
};

void unmap_own(void* context) {
  const std::unique_ptr<OwnMapping> mapping(static_cast<OwnMapping*>(context));
  munmap(mapping->data, mapping->bytes);
}
}  // namespace

std::shared_ptr<ScratchFile> ScratchFile::open(const std::string& directory) {
  std::string tried;
  for (const auto& each : directories_to_try(directory)) {
    const bool memory = is_memory(each);
    const int file = memory ? -1 : ::open(each.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (file >= 0) {
      return std::shared_ptr<ScratchFile>(new ScratchFile(file, each));
    }
    const auto why = memory ? "is memory, a tmpfs" : reason(errno);
    tried.append(tried.empty() ? "" : "; ").append(each).append(": ").append(why);
  }
  TORCH_CHECK(false,
              "no directory on a disk has room for tensors that are put aside (tried: ", tried,
              "); set BRIMFUL_SCRATCH_DIR to one");
}

ScratchFile::~ScratchFile() {
  ::close(file_);
}

int64_t ScratchFile::take(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto offset = end_;
  end_ += bytes;
  used_bytes_ += bytes;
  return offset;
}

void ScratchFile::give_back(int64_t offset, int64_t bytes) noexcept {
  const auto length = in_pages(bytes);
  const std::lock_guard lock(mutex_);
  used_bytes_ -= length;
  if (used_bytes_ == 0) {
    end_ = 0;
    [[maybe_unused]] const int done = ::ftruncate(file_, 0);
  } else {
    ::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length);
  }
}

std::shared_ptr<const ScratchFile::Part> ScratchFile::write(const void* data, int64_t bytes) {
  const Throttle throttle(bytes);
  const auto offset = take(in_pages(bytes));
  auto part = std::make_shared<const Part>(shared_from_this(), offset, bytes);
  int64_t written = 0;
  while (written < bytes) {
    const auto some = ::pwrite(file_, static_cast<const char*>(data) + written,
                               static_cast<size_t>(bytes - written), offset + written);
    if (some < 0 && errno == EINTR) {
      continue;
    }
    if (some <= 0) {
      throw_disk_error(some < 0 ? errno : ENOSPC,
                       "a tensor could not be put aside (directory: " + directory_ +
                           ", tensor: " + format_bytes(bytes) +
                           ", put aside before: " + format_bytes(used_bytes() - in_pages(bytes)) +
                           "); free some of its disk, set BRIMFUL_SCRATCH_DIR to another one, or "
                           "leave \"offload\" out of ladder");
    }
    written += some;
  }
  // Not sent to the disk at once: giving its place back would wait for that, and most is back before it has to be there.
  return part;
}

c10::DataPtr ScratchFile::map(std::shared_ptr<const Part> part) {
  const Throttle throttle(part->bytes());
  void* const data = ::mmap(nullptr, static_cast<size_t>(in_pages(part->bytes())),
                            PROT_READ | PROT_WRITE, MAP_PRIVATE, part->file_->file_, part->offset_);
  TORCH_CHECK(data != MAP_FAILED,
              "a tensor that was put aside could not be mapped: ", reason(errno),
              " (tensor: ", format_bytes(part->bytes()), ")");
  return {data, new Mapping{std::move(part), data}, &unmap, c10::Device(c10::DeviceType::CPU)};
}

c10::DataPtr ScratchFile::zeros(int64_t bytes, const std::string& directory) {
  const auto file = open(directory);  // the mapping alone keeps it
  const auto length = in_pages(bytes);
  const auto refused = ::posix_fallocate(file->file_, 0, length);
  if (refused != 0) {
    throw_disk_error(refused, "the disk has no room for a tensor (directory: " + file->directory_ +
                                  ", tensor: " + format_bytes(bytes) +
                                  "); free some of it, or set BRIMFUL_SCRATCH_DIR to another one");
  }
  void* const data = ::mmap(nullptr, static_cast<size_t>(length), PROT_READ | PROT_WRITE,
                            MAP_SHARED, file->file_, 0);
  TORCH_CHECK(data != MAP_FAILED, "a file for a tensor could not be mapped: ", reason(errno),
              " (tensor: ", format_bytes(bytes), ")");
  return {data, new OwnMapping{data, static_cast<size_t>(length)}, &unmap_own,
          c10::Device(c10::DeviceType::CPU)};
}

int64_t ScratchFile::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_bytes_;
}

std::optional<int64_t> ScratchFile::free_bytes() const {
  struct statvfs found {};
  return ::fstatvfs(file_, &found) == 0
             ? std::optional(static_cast<int64_t>(found.f_bavail * found.f_frsize))
             : std::nullopt;
}

void ScratchFile::set_bytes_per_s(int64_t rate) {
  bytes_per_s.store(rate);
}

}  // namespace brimful::ladder
