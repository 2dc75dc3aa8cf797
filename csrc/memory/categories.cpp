#include <brimful/memory/categories.h>
#include <brimful/memory/stats.h>
#include <c10/util/Exception.h>
#include <algorithm>
#include <map>
#include <tuple>
#include "memory/block_category.h"
#include "memory/cpu_allocator.h"
#include "memory/cuda.h"
#include "memory/most_bytes_first.h"
#include "memory/tracker.h"

namespace brimful::memory {
namespace {

int64_t sum_of(const std::vector<Block>& blocks) {
  int64_t sum = 0;
  for (const Block& block : blocks) {
    sum += block.bytes;
  }
  return sum;
}

struct Snapshot {
  PeakMoment peak;
  std::vector<PeakBlock> blocks;
  std::vector<Block> live;
};

void check_was_on(const BlockTable& table, c10::Device device) {
  TORCH_CHECK(table.was_on(), "memory was never tracked (device: ", device,
              "); call start_tracking first, on CUDA with torch's caching allocator");
}

Snapshot snapshot_of(c10::Device device) {
  auto& table = blocks_of(device);
  const std::lock_guard lock(table.mutex());
  check_was_on(table, device);
  return {table.peak(), table.peak_blocks(), table.live_or_last()};
}

std::vector<Block> live_of(c10::Device device) {
  auto& table = blocks_of(device);
  const std::lock_guard lock(table.mutex());
  check_was_on(table, device);
  return table.live_or_last();
}

}  // namespace

const char* name_of(Category category) {
  constexpr std::array<const char*, kCategories> kNames{
      "parameters",  "gradients", "optimizer_state", "buffers", "activations",
      "temporaries", "workspace", "communication",   "other"};
  return kNames[static_cast<size_t>(category)];
}

Peak peak_by_category(c10::Device given, const std::vector<Label>& given_labels) {
  const auto device = checked(given);
  const auto labels = with_workspaces(given_labels, device);
  const auto [moment, blocks, live] = snapshot_of(device);
  const auto found = by_data(labels);
  Peak peak;
  peak.bytes = moment.used_bytes;
  peak.step = moment.step;
  peak.phase = moment.phase;
  peak.before_bytes = moment.used_bytes - moment.tracked_bytes;
  std::map<std::tuple<uint32_t, uint32_t, Category>, PeakSite> sites;
  std::map<uint32_t, PeakModule> modules;
  for (const PeakBlock& at_peak : blocks) {
    const Block& block = at_peak.block;
    const Category category = category_of(at_peak, moment.step, found);
    of(peak.by_category, category) += block.bytes;
    PeakModule& module = modules[block.module];
    module.module = block.module;
    module.bytes += block.bytes;
    of(module.by_category, category) += block.bytes;
    PeakSite& site = sites[{block.site, block.module, category}];
    site = {block.site, block.module, category, site.bytes + block.bytes, site.blocks + 1};
  }
  if (device.is_cuda()) {  // what was asked for is less than what torch gave
    const int64_t rounding = cuda_counters(device.index()).watermark_bytes - peak.bytes;
    peak.bytes += std::max<int64_t>(rounding, 0);
    peak.before_bytes += std::max<int64_t>(rounding, 0);
  }
  share_out_before(peak.by_category, peak.before_bytes, labels, live);
  peak.by_site = most_bytes_first(sites);
  peak.by_module = most_bytes_first(modules);
  return peak;
}

CategoryBytes live_by_category(c10::Device given, const std::vector<Label>& given_labels) {
  const auto device = checked(given);
  const auto labels = with_workspaces(given_labels, device);
  const auto live = live_of(device);
  const auto found = by_data(labels);
  CategoryBytes bytes{};
  const auto step = static_cast<uint32_t>(current_step());
  for (const Block& block : live) {
    of(bytes, category_of({block, 1, false}, step, found)) += block.bytes;
  }
  share_out_before(bytes, std::max<int64_t>(0, stats(device).used_bytes - sum_of(live)), labels,
                   live);
  return bytes;
}

std::optional<Label> label_of(const c10::Storage& storage, Category category) {
  auto* const impl = storage.unsafeGetStorageImpl();
  const auto device = impl->device();
  if (!device.is_cuda() && !device.is_cpu()) {
    return std::nullopt;  // a fake tensor's has neither an address nor a size to ask for
  }
  const auto& pointer = impl->_mutable_data_ptr_no_checks();
  const bool is_ours =
      device.is_cuda() || pointer.get_deleter() == BudgetAllocator::instance().raw_deleter();
  if (!is_ours || pointer.get() == nullptr || storage.nbytes() == 0) {
    return std::nullopt;
  }
  return Label{pointer.get(), static_cast<int64_t>(storage.nbytes()), category};
}

}  // namespace brimful::memory
