#pragma once
#include <algorithm>
#include <map>
#include <vector>

namespace brimful::memory {

template <typename Key, typename Part>
std::vector<Part> most_bytes_first(const std::map<Key, Part>& parts) {
  std::vector<Part> sorted;
  sorted.reserve(parts.size());
  for (const auto& [key, part] : parts) {
    sorted.push_back(part);
  }
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Part& a, const Part& b) { return a.bytes > b.bytes; });
  return sorted;
}

}  // namespace brimful::memory
