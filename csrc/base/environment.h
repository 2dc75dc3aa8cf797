#pragma once
#include <sys/resource.h>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>

// What a process was started with.
namespace brimful {

/// The variable's text; empty where it is not set.
inline std::string environment(const char* name) {
  const char* const text = std::getenv(name);
  return text == nullptr ? "" : text;
}

/// The whole number that the variable begins with, else `otherwise`.
inline int64_t environment_number(const char* name, int64_t otherwise) {
  const std::string text = environment(name);
  std::from_chars(text.data(), text.data() + text.size(), otherwise);
  return otherwise;
}

/// For a file whose own folder refuses it: TMPDIR, or TMP, TEMP or TEMPDIR where that is not set, else /tmp.
inline std::string temporary_folder() {
  for (const char* const name : {"TMPDIR", "TMP", "TEMP", "TEMPDIR"}) {
    if (auto folder = environment(name); !folder.empty()) {
      return folder;
    }
  }
  return "/tmp";
}

/// Of RLIMIT_AS and its like; nothing: none.
inline std::optional<int64_t> soft_limit(decltype(RLIMIT_AS) resource) {
  rlimit limit{};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return std::nullopt;
  }
  return static_cast<int64_t>(limit.rlim_cur);
}

}  // namespace brimful
