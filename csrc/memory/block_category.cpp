#include "memory/block_category.h"
#include <algorithm>
#include <unordered_set>
#include "memory/cuda.h"

namespace brimful::memory {
namespace {

Category category_of_life(const Block& block, uint32_t step) {
  switch (block.phase) {
    case Phase::forward:
      return block.step < step ? Category::other : Category::activations;
    case Phase::backward:
      return Category::gradients;
    case Phase::optimizer:
      return Category::optimizer_state;
    case Phase::other:
      return Category::other;
  }
  return Category::other;
}

}  // namespace

Labels by_data(const std::vector<Label>& labels) {
  Labels found;
  for (const Label& label : labels) {
    found.emplace(label.data, &label);
  }
  return found;
}

std::vector<Label> with_workspaces(std::vector<Label> labels, c10::Device device) {
  for (const CudaWorkspace& workspace : cuda_workspaces(device)) {
    labels.push_back({workspace.data, workspace.bytes, Category::workspace});
  }
  return labels;
}

Category category_of(const PeakBlock& at_peak, uint32_t step, const Labels& labels) {
  const Block& block = at_peak.block;
  if (block.category != kNoCategory) {
    return static_cast<Category>(block.category);
  }
  if (at_peak.slot != 0) {
    if (const auto label = labels.find(block.data); label != labels.end()) {
      return label->second->category;
    }
  }
  return at_peak.temporary ? Category::temporaries : category_of_life(block, step);
}

void share_out_before(CategoryBytes& bytes, int64_t before_bytes, const std::vector<Label>& labels,
                      const std::vector<Block>& live) {
  std::unordered_set<const void*> tracked;
  for (const Block& block : live) {
    tracked.insert(block.data);
  }
  for (const auto& [data, label] : by_data(labels)) {
    if (!tracked.contains(data)) {
      const int64_t share = std::min(before_bytes, label->bytes);
      of(bytes, label->category) += share;
      before_bytes -= share;
    }
  }
  of(bytes, Category::other) += before_bytes;
}

}  // namespace brimful::memory
