#include "base/whole_file.h"
#include <fcntl.h>
#include <unistd.h>
#include <cerrno>
#include <system_error>
#include "base/replace_file.h"

namespace brimful {
namespace {

class File {
 public:
  explicit File(const std::string& path)
      : path_(path), fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    check(fd_ >= 0);
  }
  ~File() {
    if (fd_ >= 0) {
      close(fd_);
    }
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  /// As read(2), again where a signal came in between.
  template <typename Call>
  size_t move(const Call& call) const {
    for (;;) {
      const ssize_t moved = call(fd_);
      if (moved >= 0 || errno != EINTR) {
        check(moved >= 0);
        return static_cast<size_t>(moved);
      }
    }
  }

 private:
  void check(bool is_well) const {
    if (!is_well) {
      throw std::system_error(errno, std::generic_category(), path_);
    }
  }

  std::string path_;
  int fd_;
};

}  // namespace

std::string read_file(const std::string& path) {
  const File file(path);
  constexpr size_t kPart = size_t{1} << 20;
  std::string text;
  for (;;) {
    const size_t had = text.size();
    text.resize(had + kPart);
    const size_t count = file.move([&](int fd) { return read(fd, text.data() + had, kPart); });
    text.resize(had + count);
    if (count == 0) {
      return text;
    }
  }
}

void write_file(const std::string& path, const std::string& text) {
  replace_file(path, Durable::no, [&](const ByteSink& sink) { sink(text.data(), text.size()); });
}

}  // namespace brimful
