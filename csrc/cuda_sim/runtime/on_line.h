#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>

namespace sim {

/// Bytes at this many rows: on the line through the two known numbers of rows beside it, or the two next to it on one side; in
/// proportion to the only one; none where none is known.
inline int64_t on_line(const std::map<int64_t, int64_t>& known, int64_t rows) {
  if (known.empty()) {
    return 0;
  }
  auto right = known.lower_bound(rows);
  if (right != known.end() && right->first == rows) {
    return right->second;
  }
  if (known.size() == 1) {
    return known.begin()->second * rows / known.begin()->first;
  }
  if (right == known.begin()) {
    ++right;
  } else if (right == known.end()) {
    --right;
  }
  const auto left = std::prev(right);
  const double slope = static_cast<double>(right->second - left->second) /
                       static_cast<double>(right->first - left->first);
  const double bytes =
      static_cast<double>(left->second) + slope * static_cast<double>(rows - left->first);
  return std::max<int64_t>(static_cast<int64_t>(bytes), 0);
}

}  // namespace sim
