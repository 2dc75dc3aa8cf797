// What a program has changed in its view of the files.
#include <ftw.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>

#include "guard.h"

namespace guard {
namespace {

struct Change {
  std::string path;
  int64_t bytes = 0;  ///< -1: removed.
};

// nftw() calls a function without an argument of ours.
std::vector<Change>* found = nullptr;
const Layer* layer = nullptr;

int note(const char* path, const struct stat* entry, int type, FTW* /*where*/) {
  const auto known = layer->point + (path + layer->upper.size());
  if (type == FTW_F && S_ISCHR(entry->st_mode) && entry->st_rdev == makedev(0, 0)) {
    found->push_back({known, -1});
  } else if (type == FTW_F || type == FTW_SL) {
    found->push_back({known, entry->st_size});
  }
  return 0;
}

/// A line for each change, whatever is in a name.
std::string as_line(const std::string& path) {
  std::string text;
  for (const char c : path) {
    text += c == '\n' ? std::string("\\n") : c == '\\' ? std::string("\\\\") : std::string(1, c);
  }
  return text;
}

}  // namespace

Changes changes_of(const Redirection& redirection) {
  std::vector<Change> all;
  found = &all;
  for (const auto& each : redirection.layers) {
    layer = &each;
    nftw(each.upper.c_str(), note, 32, FTW_PHYS);
  }
  std::sort(all.begin(), all.end(),
            [](const Change& one, const Change& other) { return one.path < other.path; });
  Changes changes;
  for (const auto& each : all) {
    if (each.bytes < 0) {
      ++changes.removed;
      changes.lines += "removed " + as_line(each.path) + "\n";
    } else {
      ++changes.written;
      changes.bytes += each.bytes;
      changes.lines += "written " + std::to_string(each.bytes) + " " + as_line(each.path) + "\n";
    }
  }
  return changes;
}

}  // namespace guard
