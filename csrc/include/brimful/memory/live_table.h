#pragma once
#include <brimful/export.h>
#include <c10/core/Device.h>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// Which line of whose code holds what of a device's memory. Off until start_tracking(); then each allocation of the CPU
/// (brimful's allocator) and of CUDA (torch's) is kept with its step, its phase and its site until it is freed.
/// All functions may be called from any thread; none waits for a device.
namespace brimful::memory {

/// What a thread was about when it allocated. Backward: an autograd node runs. Optimizer: a PhaseScope is open (Python:
/// within any torch.optim.Optimizer.step). Forward: graph nodes were made since the last backward, optimizer or step, or
/// they are made again within backward (checkpointing). Other: all else, such as the model and its batches.
enum class Phase : uint8_t { forward, backward, optimizer, other };
BRIMFUL_API const char* name_of(Phase phase);

/// A line of code. Python: the innermost one outside torch and brimful; in backward, the line whose forward made the
/// node. C++: the name given to SiteScope, in `function`.
struct Site {
  std::string file;
  int line = 0;
  std::string function;
};
/// The site of what no line is known for.
constexpr uint32_t kNoSite = 0;

struct LiveBlock {
  const void* data = nullptr;
  int64_t bytes = 0;   ///< as the allocator counts it: the CPU's to the byte, CUDA's rounded up
  int64_t step = 0;    ///< marks made before it was born
  uint64_t birth = 0;  ///< number among the events of its device: no two blocks have the same
  uint32_t site = kNoSite;
  uint32_t module =
      kNoSite;  ///< site() of the innermost ModuleScope, or of its forward's in backward
  Phase phase = Phase::other;
};

/// Empties the table and begins to fill it. Blocks from before are not in it, only their sum (Peak::before_bytes).
/// CUDA devices are followed from the moment that they are in use (in a C++ program: from the first tensor on the CPU after
/// it, or before this call); where torch's allocator has no hook (cudaMallocAsync), one warning says so and the CPU is
/// tracked alone.
/// @throws c10::Error if tracking is on
BRIMFUL_API void start_tracking();
/// Ends it and empties the table; peaks stay readable until the next start. Nothing happens where it is off.
/// In the child of a fork tracking is off, and its table is empty.
BRIMFUL_API void stop_tracking();
BRIMFUL_API bool tracking() noexcept;

/// Ends a step. Python does it after each optimizer step, unless mark_step was called by hand since the start.
BRIMFUL_API void mark_step();
/// Marks since start_tracking.
BRIMFUL_API int64_t current_step() noexcept;

/// All blocks of the device that live and were born since start_tracking, the oldest first.
BRIMFUL_API std::vector<LiveBlock> live_blocks(c10::Device device = c10::DeviceType::CPU);
/// The block that begins at `data` (a storage's, not a view's); looks through all blocks of the device.
BRIMFUL_API std::optional<LiveBlock> find_block(const void* data,
                                                c10::Device device = c10::DeviceType::CPU);
/// Sites keep their numbers until the process ends. An empty Site for kNoSite.
/// @throws c10::IndexError for a number that was never given
BRIMFUL_API Site site(uint32_t id);
/// The number of a site; the same for the same text.
BRIMFUL_API uint32_t site_id(const Site& site);
/// "train.py:31 (step)"; "(unknown)" for kNoSite.
BRIMFUL_API std::string to_string(const Site& site);

/// Blocks alive, by site and phase of birth.
struct SiteUse {
  uint32_t site = kNoSite;
  Phase phase = Phase::other;
  int64_t bytes = 0;
  int64_t blocks = 0;
  /// How many of them were born in which step, rising; a site that grows has many steps here.
  std::vector<std::pair<int64_t, int64_t>> born;
};
/// The most bytes first.
BRIMFUL_API std::vector<SiteUse> live_by_site(c10::Device device = c10::DeviceType::CPU);

struct TrackingCounts {
  int64_t events = 0;  ///< births and deaths
  int64_t births = 0;
  int64_t unsited = 0;  ///< births without a site
};
BRIMFUL_API TrackingCounts tracking_counts(c10::Device device = c10::DeviceType::CPU);

/// This thread's phase while it lives. Nests; destroy it on the same thread. In a C++ program: around optimizer.step().
class BRIMFUL_API PhaseScope {
 public:
  explicit PhaseScope(Phase phase) noexcept;
  ~PhaseScope();
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  uint8_t outer_;
};

/// Names this thread's allocations while it lives, and those of the backward of nodes made in it.
class BRIMFUL_API SiteScope {
 public:
  explicit SiteScope(const std::string& name);
  explicit SiteScope(uint32_t site) noexcept;
  ~SiteScope();
  SiteScope(const SiteScope&) = delete;
  SiteScope& operator=(const SiteScope&) = delete;

 private:
  uint32_t outer_;
};

/// The same for LiveBlock::module.
class BRIMFUL_API ModuleScope {
 public:
  explicit ModuleScope(const std::string& name);
  explicit ModuleScope(uint32_t name) noexcept;
  ~ModuleScope();
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;

 private:
  uint32_t outer_;
};

}  // namespace brimful::memory
