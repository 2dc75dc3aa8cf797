#pragma once
#include <brimful/export.h>
#include <brimful/memory/live_table.h>
#include <c10/core/Storage.h>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

/// What a device's memory was used for when the most of it was in use. Needs tracking (live_table.h).
namespace brimful::memory {

/// A block's category is, in this order: the CategoryScope in which it was born, the label that peak_by_category is given
/// for it, or what its life says. Freed in the phase in which it was born: temporaries. Else by that phase: forward:
/// activations; backward: gradients; optimizer: optimizer state; other: other.
/// Blocks that a forward of an earlier step than the peak's left behind are other, too.
/// Communication is known by CategoryScope alone; so gradients that are views of the reducer's buckets are communication.
/// Workspace is too, and what torch keeps for cuBLAS and cuBLASLt from call to call; scratch that an operator gives back is
/// temporary. What lies beside the allocator (CUDA's context) is in no category: probes::context_bytes (probes/gpus.h).
enum class Category : uint8_t {
  parameters,
  gradients,
  optimizer_state,
  buffers,
  activations,
  temporaries,
  workspace,
  communication,
  other,
};
constexpr size_t kCategories = static_cast<size_t>(Category::other) + 1;
BRIMFUL_API const char* name_of(Category category);

using CategoryBytes = std::array<int64_t, kCategories>;

struct PeakSite {
  uint32_t site = kNoSite;
  uint32_t module = kNoSite;
  Category category = Category::other;
  int64_t bytes = 0;
  int64_t blocks = 0;
};

struct PeakModule {
  uint32_t module = kNoSite;  ///< site() of a ModuleScope's name; kNoSite: outside of all
  int64_t bytes = 0;
  CategoryBytes by_category{};
};

struct Peak {
  int64_t bytes =
      0;  ///< the allocator's: Stats::peak_bytes since start_tracking or the last reset_peak
  int64_t step = 0;  ///< in which it was reached
  Phase phase = Phase::other;
  CategoryBytes by_category{};  ///< their sum is `bytes`, to the byte
  /// Of blocks from before start_tracking; in by_category they are other, but for those with a label.
  int64_t before_bytes = 0;
  std::vector<PeakSite> by_site;      ///< of blocks since start_tracking, the most bytes first
  std::vector<PeakModule> by_module;  ///< the same
};

/// A storage that lives and is known to be a parameter, a gradient, ...: its first byte and its size.
struct Label {
  const void* data = nullptr;
  int64_t bytes = 0;
  Category category = Category::other;
};

/// Nothing where the allocators here do not hold it: pinned, shared or mapped memory, an empty storage.
BRIMFUL_API std::optional<Label> label_of(const c10::Storage& storage, Category category);

/// The peak of a device since start_tracking or the last reset_peak. Work is in proportion to the blocks that live
/// or lived at the peak. May be called at any time, also after stop_tracking: then labels count for blocks that lived at the stop.
/// @throws c10::Error if tracking was never on
BRIMFUL_API Peak peak_by_category(c10::Device device = c10::DeviceType::CPU,
                                  const std::vector<Label>& labels = {});

/// What lives now, by the same rules.
BRIMFUL_API CategoryBytes live_by_category(c10::Device device = c10::DeviceType::CPU,
                                           const std::vector<Label>& labels = {});

/// This thread's allocations are of this category while it lives. Nests; destroy it on the same thread.
class BRIMFUL_API CategoryScope {
 public:
  explicit CategoryScope(Category category) noexcept;
  ~CategoryScope();
  CategoryScope(const CategoryScope&) = delete;
  CategoryScope& operator=(const CategoryScope&) = delete;

 private:
  uint8_t outer_;
};

}  // namespace brimful::memory
