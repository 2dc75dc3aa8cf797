#include "launch/replace_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>

namespace brimful::launch {
namespace {

constexpr mode_t kMode = 0666;  // less the umask

[[noreturn]] void refuse(int error, const char* what, const std::string& path, const char* remedy) {
  throw std::system_error(error, std::generic_category(),
                          std::string(what) + " (path: " + path + ")" + remedy);
}

/// A file that goes away unless it takes its place.
class PartialFile {
 public:
  explicit PartialFile(const std::string& path)
      : path_(path),
        partial_(path + ".partial"),
        fd_(open(partial_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, kMode)) {
    if (fd_ < 0) {
      refuse(errno, "cannot open a checkpoint's file", partial_,
             "; make its folder and let rank 0 write there");
    }
  }
  ~PartialFile() {
    if (fd_ >= 0) {
      close(fd_);
      unlink(partial_.c_str());
    }
  }
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;

  void add(const void* bytes, size_t count) {
    const auto* from = static_cast<const char*>(bytes);
    while (count > 0 && error_ == 0) {
      const auto written = write(fd_, from, count);
      if (written >= 0) {
        from += written;
        count -= static_cast<size_t>(written);
      } else if (errno != EINTR) {
        error_ = errno;
      }
    }
  }

  void take_place() {
    if (error_ == 0 && fsync(fd_) != 0) {
      error_ = errno;
    }
    if (error_ != 0) {
      refuse(error_, "cannot write a checkpoint's file", partial_, "; the old one is as it was");
    }
    if (rename(partial_.c_str(), path_.c_str()) != 0) {
      refuse(errno, "cannot put a checkpoint in its place", path_, "; name a file");
    }
    close(fd_);
    fd_ = -1;
    sync_folder();
  }

 private:
  /// The new name is on the disk too, where the file system can say so.
  void sync_folder() const {
    const auto slash = path_.rfind('/');
    const auto folder = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
    const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
      fsync(fd);
      close(fd);
    }
  }

  std::string path_;
  std::string partial_;
  int fd_;
  int error_ = 0;
};

}  // namespace

void replace_file(const std::string& path, const std::function<void(const ByteSink&)>& write) {
  PartialFile file(path);
  write([&](const void* bytes, size_t count) {
    file.add(bytes, count);
    return count;
  });
  file.take_place();
}

}  // namespace brimful::launch
