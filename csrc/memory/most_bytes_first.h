#pragma once
#include <brimful/memory/categories.h>

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

/// Those that have bytes.
inline std::vector<Category> most_bytes_first(const CategoryBytes& bytes) {
  const auto bytes_of = [&](Category category) { return bytes[static_cast<size_t>(category)]; };
  std::vector<Category> sorted;
  for (size_t k = 0; k < kCategories; ++k) {
    if (bytes[k] != 0) {
      sorted.push_back(static_cast<Category>(k));
    }
  }
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](Category a, Category b) { return bytes_of(a) > bytes_of(b); });
  return sorted;
}

}  // namespace brimful::memory
