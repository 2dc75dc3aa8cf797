#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <iterator>
#include "memory/system_bounds.h"

namespace brimful::memory {
namespace {

constexpr int64_t kNoBound = int64_t{1} << 62;  // v1 states the most that a page counter holds

struct Files {
  LimitSource version;
  const char* bound;
  const char* in_use;
  const char* idle_cache;  // in memory.stat
};
constexpr std::array kVersions{
    Files{LimitSource::cgroup_v2, "memory.max", "memory.current", "inactive_file"},
    Files{LimitSource::cgroup_v1, "memory.limit_in_bytes", "memory.usage_in_bytes",
          "total_inactive_file"},
};

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const auto end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) {
      return parts;
    }
    text.remove_prefix(end + 1);
  }
}

bool lists(std::string_view comma_separated, std::string_view name) {
  const auto names = split(comma_separated, ',');
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// This process's path in the hierarchy: "4:memory:/path" of v1, "0::/path" of v2.
std::optional<std::string> own_path(std::string_view cgroups, LimitSource version,
                                    std::string_view controller) {
  for (const auto line : split(cgroups, '\n')) {
    const auto first = line.find(':');
    const auto second = first == std::string_view::npos ? first : line.find(':', first + 1);
    if (second == std::string_view::npos) {
      continue;
    }
    const auto controllers = line.substr(first + 1, second - first - 1);
    if (version == LimitSource::cgroup_v2 ? controllers.empty() : lists(controllers, controller)) {
      return std::string(line.substr(second + 1));
    }
  }
  return std::nullopt;
}

/// mountinfo writes spaces and the like as a backslash and three octal digits.
std::string unescape(std::string_view text) {
  const auto octal = [](char c) { return c >= '0' && c <= '7'; };
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size() && octal(text[i + 1]) && octal(text[i + 2]) &&
        octal(text[i + 3])) {
      plain += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 +
                                 (text[i + 3] - '0'));
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

struct Mount {
  std::string root;  // of the hierarchy: what is seen at `point`
  std::string point;
};

/// "31 23 0:28 ROOT POINT OPTIONS [more] - TYPE SOURCE SUPER_OPTIONS"
std::vector<Mount> mounts_of(std::string_view mountinfo, LimitSource version,
                             std::string_view controller) {
  std::vector<Mount> found;
  for (const auto line : split(mountinfo, '\n')) {
    const auto dash = line.find(" - ");
    if (dash == std::string_view::npos) {
      continue;
    }
    const auto left = split(line.substr(0, dash), ' ');
    const auto right = split(line.substr(dash + 3), ' ');
    if (left.size() < 5 || right.size() < 3) {
      continue;
    }
    if (version == LimitSource::cgroup_v2 ? right[0] == "cgroup2"
                                          : right[0] == "cgroup" && lists(right[2], controller)) {
      found.push_back({unescape(left[3]), unescape(left[4])});
    }
  }
  return found;
}

/// `path` as seen below a mount of `root`: "" for the root itself; nothing if it lies elsewhere.
std::optional<std::string> below(const std::string& path, const std::string& root) {
  if (path.find("/..") != std::string::npos) {  // above the namespace's root
    return std::nullopt;
  }
  const std::string prefix = root == "/" ? "" : root;
  const std::string own = path == "/" ? "" : path;
  if (!own.starts_with(prefix) || (own.size() > prefix.size() && own[prefix.size()] != '/')) {
    return std::nullopt;
  }
  return own.substr(prefix.size());
}

std::optional<int64_t> number_in(const std::string& text) {
  return number_after(text, "");
}

}  // namespace

std::string read_or_empty(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::optional<int64_t> number_after(std::string_view text, std::string_view key) {
  for (auto line : split(text, '\n')) {
    if (!line.starts_with(key)) {
      continue;
    }
    line.remove_prefix(key.size());
    const auto digits = line.find_first_not_of(" \t");
    if (digits == std::string_view::npos) {
      continue;
    }
    int64_t number = 0;
    const auto status = std::from_chars(line.data() + digits, line.data() + line.size(), number).ec;
    if (status == std::errc()) {
      return number;
    }
  }
  return std::nullopt;
}

std::vector<std::string> cgroup_folders(std::string_view cgroups, std::string_view mounts,
                                        LimitSource version, std::string_view controller) {
  const auto path = own_path(cgroups, version, controller);
  const auto mounted = mounts_of(mounts, version, controller);
  if (!path || mounted.empty()) {
    return {};
  }
  const std::string* point = &mounted.front().point;
  std::string inner;
  for (const auto& mount : mounted) {
    if (const auto rest = below(*path, mount.root)) {
      point = &mount.point;
      inner = *rest;
      break;
    }
  }
  std::vector<std::string> folders{*point + inner};
  while (!inner.empty()) {
    inner.resize(inner.rfind('/'));
    folders.push_back(*point + inner);
  }
  return folders;
}

std::vector<Bound> cgroup_bounds(const std::string& root, const ProcessMemory& process) {
  const std::string cgroups = read_or_empty(root + "/proc/self/cgroup");
  const std::string mounts = read_or_empty(root + "/proc/self/mountinfo");
  std::vector<Bound> bounds;
  for (const auto& files : kVersions) {
    for (const auto& folder : cgroup_folders(cgroups, mounts, files.version)) {
      const std::string where = folder + "/" + files.bound;
      const auto bytes = number_in(read_or_empty(root + where));
      if (!bytes || *bytes >= kNoBound) {
        continue;
      }
      const auto in_use = number_in(read_or_empty(root + folder + "/" + files.in_use));
      const auto idle =
          number_after(read_or_empty(root + folder + "/memory.stat"), files.idle_cache);
      const int64_t held =
          in_use ? std::max<int64_t>(0, *in_use - idle.value_or(0)) : process.anonymous_bytes;
      bounds.push_back({files.version, where, *bytes, std::max<int64_t>(0, *bytes - held)});
    }
  }
  return bounds;
}

}  // namespace brimful::memory
