#include "base/replace_file.h"
#include "base/one_line.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <optional>
#include <random>
#include <string_view>
#include <system_error>
#include <utility>

namespace brimful {
namespace {

constexpr mode_t kMode = 0666;  // less the umask
constexpr size_t kLongestName = 255;

[[noreturn]] void refuse(int error, const char* what, const std::string& path,
                         const std::string& remedy) {
  throw std::system_error(error, std::generic_category(),
                          std::string(what) + " (path: " + one_line(path) + ")" + remedy);
}

std::string_view kind_of(mode_t mode) {
  switch (mode & S_IFMT) {
    case S_IFLNK:
      return "a symbolic link";
    case S_IFIFO:
      return "a FIFO";
    case S_IFCHR:
    case S_IFBLK:
      return "a device";
    case S_IFSOCK:
      return "a socket";
    default:
      return "a folder";
  }
}

/// Open, or -1; closed with its owner.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) {
      close(fd_);
    }
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

  /// 0, or the error.
  int write_all(const char* from, size_t count) const {
    while (count > 0) {
      const auto written = write(fd_, from, count);
      if (written < 0 && errno != EINTR) {
        return errno;
      }
      from += written < 0 ? 0 : written;
      count -= written < 0 ? 0 : static_cast<size_t>(written);
    }
    return 0;
  }
  int close_whole() { return close(std::exchange(fd_, -1)) == 0 ? 0 : errno; }

 private:
  int fd_;
};

/// A folder, kept open so that no other comes in its place, and a name in it.
struct Place {
  explicit Place(const std::string& given)
      : path(given),
        name(given.substr(given.rfind('/') + 1)),
        folder(open(
            given.size() == name.size() ? "." : given.substr(0, given.size() - name.size()).c_str(),
            O_PATH | O_DIRECTORY | O_CLOEXEC)) {
    if (given.find('\0') != std::string::npos) {
      refuse(EINVAL, "a path has no zero bytes", given, "; name a file");
    }
    if (folder.get() < 0) {
      refuse(errno, "cannot open the folder of a file", path, "; make it");
    }
    if (name.empty() || name == "." || name == "..") {
      refuse(EISDIR, "this names a folder", path, "; name a file");
    }
  }

  /// The mode of the regular file that is there now, if there is one.
  std::optional<mode_t> mode() const {
    struct stat found {};
    if (fstatat(folder.get(), name.c_str(), &found, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno == ENOENT) {
        return std::nullopt;
      }
      refuse(errno, "cannot look at the file", path, "");
    }
    if (!S_ISREG(found.st_mode)) {
      refuse_kind(found.st_mode);
    }
    return found.st_mode & 0777;
  }

  [[noreturn]] void refuse_kind(mode_t found) const {
    std::string to;
    if (S_ISLNK(found)) {
      std::array<char, PATH_MAX> target{};
      const auto size = readlinkat(folder.get(), name.c_str(), target.data(), target.size());
      to = ", a link to: " + one_line({target.data(), size > 0 ? static_cast<size_t>(size) : 0});
    }
    const auto what = "only a regular file is written to, and this is " +
                      std::string(kind_of(found)) + " (path: " + one_line(path) + to + ")";
    const int error = S_ISLNK(found) ? ELOOP : S_ISDIR(found) ? EISDIR : EINVAL;
    throw std::system_error(error, std::generic_category(), what + "; name a file");
  }

  std::string path;
  std::string name;
  Descriptor folder;
};

std::string unforeseen_name(const std::string& name) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::random_device random;
  std::string own = ".";
  for (int k = 0; k < 16; ++k) {
    own += kDigits[random() % kDigits.size()];
  }
  own += ".partial";
  return std::string(first_bytes(name, kLongestName - own.size())) + own;
}

/// A file that goes away unless it takes its place.
class PartialFile {
 public:
  explicit PartialFile(const std::string& path)
      : place_(path),
        mode_(place_.mode()),
        partial_(unforeseen_name(place_.name)),
        file_(openat(place_.folder.get(), partial_.c_str(),
                     O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode_.value_or(kMode))) {
    if (file_.get() < 0) {
      refuse(errno, "cannot open a new file beside the old one", path,
             "; let this process write into its folder");
    }
    is_there_ = true;
    if (mode_ && fchmod(file_.get(), *mode_) != 0 && errno != EPERM) {
      error_ = errno;
    }
  }
  ~PartialFile() {
    if (is_there_) {
      unlinkat(place_.folder.get(), partial_.c_str(), 0);
    }
  }
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;

  void add(const void* bytes, size_t count) {
    if (error_ == 0) {
      error_ = file_.write_all(static_cast<const char*>(bytes), count);
    }
  }

  void take_place(Durable durable) {
    const bool lasts = durable == Durable::yes;
    if (error_ == 0 && lasts && fsync(file_.get()) != 0) {
      error_ = errno;
    }
    if (const int closed = file_.close_whole(); error_ == 0) {
      error_ = closed;
    }
    if (error_ != 0) {
      refuse(error_, "cannot write the file", place_.path, "; the old one is as it was");
    }
    place_.mode();  // what came there meanwhile
    const int folder = place_.folder.get();
    if (renameat(folder, partial_.c_str(), folder, place_.name.c_str()) != 0) {
      refuse(errno, "cannot put the file in its place", place_.path, "; the old one is as it was");
    }
    is_there_ = false;
    if (lasts) {  // the new name too, where the file system can say so
      const Descriptor names(openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
      fsync(names.get());
    }
  }

 private:
  Place place_;
  std::optional<mode_t> mode_;
  std::string partial_;
  Descriptor file_;
  bool is_there_ = false;
  int error_ = 0;
};

}  // namespace

void replace_file(const std::string& path, Durable durable,
                  const std::function<void(const ByteSink&)>& write) {
  PartialFile file(path);
  write([&](const void* bytes, size_t count) {
    file.add(bytes, count);
    return count;
  });
  file.take_place(durable);
}

void append_to_file(const std::string& path, const std::string& text) {
  const Place place(path);
  place.mode();
  constexpr int kFlags = O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  Descriptor file(openat(place.folder.get(), place.name.c_str(), kFlags, kMode));
  struct stat found {};
  if (file.get() < 0 || fstat(file.get(), &found) != 0) {
    refuse(errno, "cannot open the file", path, "; let this process write there");
  }
  if (!S_ISREG(found.st_mode)) {
    place.refuse_kind(found.st_mode);
  }
  int error = file.write_all(text.data(), text.size());
  if (const int closed = file.close_whole(); error == 0) {
    error = closed;
  }
  if (error != 0) {
    refuse(error, "cannot write the file", path, "");
  }
}

}  // namespace brimful
