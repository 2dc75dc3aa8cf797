#pragma once
#include <brimful/memory/categories.h>
#include <unordered_map>
#include <vector>
#include "memory/block_table.h"

namespace brimful::memory {

using Labels = std::unordered_map<const void*, const Label*>;
Labels by_data(const std::vector<Label>& labels);
/// Those, and what torch keeps of the device for its libraries.
std::vector<Label> with_workspaces(std::vector<Label> labels, c10::Device device);

/// Of a block that lives (it has a slot) or was freed, as seen in `step`.
Category category_of(const PeakBlock& block, uint32_t step, const Labels& labels);

inline int64_t& of(CategoryBytes& bytes, Category category) {
  return bytes[static_cast<size_t>(category)];
}

/// A label that no block of the table answers to is of a block from before: it lived all the time, for it lives now.
/// Adds all of `before_bytes`; what has no label is other.
void share_out_before(CategoryBytes& bytes, int64_t before_bytes, const std::vector<Label>& labels,
                      const std::vector<Block>& live);

}  // namespace brimful::memory
