#pragma once
#include <brimful/export.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace brimful::ladder {

/// Room on a disk for what a step puts aside: a file without a name, so that nothing of it stays behind a process that is
/// killed. Thread-safe.
class BRIMFUL_API ScratchFile : public std::enable_shared_from_this<ScratchFile> {
 public:
  /// In `directory`, or where that is empty in BRIMFUL_SCRATCH_DIR, or where that is not set in the first of TMPDIR, /var/tmp
  /// and /tmp that is on a disk (a tmpfs is memory, too).
  /// @throws c10::Error that names the directories where none will do
  static std::shared_ptr<ScratchFile> open(const std::string& directory = {});
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  /// A copy of some bytes.
  class Part {
   public:
    Part(std::shared_ptr<ScratchFile> file, int64_t offset, int64_t bytes)
        : file_(std::move(file)), offset_(offset), bytes_(bytes) {}
    ~Part() { file_->give_back(offset_, bytes_); }
    Part(const Part&) = delete;
    Part& operator=(const Part&) = delete;
    int64_t bytes() const { return bytes_; }

   private:
    friend class ScratchFile;
    std::shared_ptr<ScratchFile> file_;
    int64_t offset_;
    int64_t bytes_;
  };
  /// @throws std::system_error where the disk is full or fails
  std::shared_ptr<const Part> write(const void* data, int64_t bytes);
  /// The bytes, in memory that the system may take away meanwhile, and that counts against no limit: pages of the file.
  /// Writes to it do not reach the file.
  /// @throws c10::Error where the system refuses
  static c10::DataPtr map(std::shared_ptr<const Part> part);
  /// Zeros in a file of their own, in a directory as of open(). Writes reach the file, so that written pages, too, are the
  /// system's to take away. The file is gone with the memory.
  /// @throws c10::Error where no directory will do, std::system_error where the disk has no room
  static c10::DataPtr zeros(int64_t bytes, const std::string& directory = {});

  int64_t used_bytes() const;
  /// That the disk has left; nothing where it does not say.
  std::optional<int64_t> free_bytes() const;
  const std::string& directory() const { return directory_; }
  /// For measurements: as if the disk took and gave no more than this; 0: as it is.
  static void set_bytes_per_s(int64_t bytes_per_s);

 private:
  ScratchFile(int file, std::string directory) : file_(file), directory_(std::move(directory)) {}
  int64_t take(int64_t bytes);
  void give_back(int64_t offset, int64_t bytes) noexcept;

  int file_;
  std::string directory_;
  mutable std::mutex mutex_;
  int64_t end_ = 0;
  int64_t used_bytes_ = 0;
};

}  // namespace brimful::ladder
