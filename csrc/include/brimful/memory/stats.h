#pragma once
#include <brimful/export.h>
#include <c10/core/Device.h>
#include <cstdint>
#include <optional>

/// What a device's memory holds, and how much it may hold. CPU memory is counted by brimful's own allocator, which
/// every function here that is given a CPU device installs first; CUDA memory by torch's caching allocator.
/// All functions may be called from any thread. None synchronises a device except release_cached.
/// All throw c10::ValueError for a device that is neither a CPU nor a CUDA device of this machine.
namespace brimful::memory {

struct Stats {
  /// Held by live tensors. CPU: bytes asked for since install(), to the byte (pinned, shared and mapped memory and
  /// memory from before install() are not in it). CUDA: torch.cuda.memory_allocated.
  int64_t used_bytes = 0;
  /// The most that used_bytes has been since the last reset_peak, PeakScopes notwithstanding.
  int64_t peak_bytes = 0;
  /// As given to set_limit; nothing where there is no limit. On CUDA also what torch's own memory fraction allows, where
  /// the program has set it without set_limit, or since.
  std::optional<int64_t> limit_bytes;
  /// CUDA: held from the driver, cached blocks included. CPU: equal to used_bytes.
  int64_t reserved_bytes = 0;
  /// Allocations that succeeded so far; never reset by brimful.
  int64_t allocations = 0;
  /// Allocations that were refused so far, those of a FaultAt included; never reset by brimful.
  int64_t ooms = 0;
  /// False: the device's allocator keeps no statistics (CUDA's pluggable allocators). The numbers are 0 and say nothing, no
  /// limit can be set, and PeakScopes see 0.
  bool counted = true;
};

BRIMFUL_API Stats stats(c10::Device device);

/// Allocations that would bring the device above `bytes` throw c10::OutOfMemoryError from now on; nothing removes the
/// limit. A limit below what is in use frees nothing: later allocations fail.
/// CPU: exact, on used_bytes. CUDA: by torch's per-process fraction, on reserved_bytes, which grow in whole segments.
/// @throws c10::ValueError if `bytes` is negative
/// @throws c10::NotImplementedError for a limit of an allocator that keeps no statistics
BRIMFUL_API void set_limit(c10::Device device, std::optional<int64_t> bytes);

/// The most that this process's tensors may take of the device in all: the limit, and on CUDA no more than what they have and
/// what the driver has free beside other processes. Nothing on a CPU without a limit, and where the allocator keeps no
/// statistics. Does not wait for the device.
BRIMFUL_API std::optional<int64_t> capacity_bytes(c10::Device device);

/// Sets Stats::peak_bytes to what is in use now. Open PeakScopes keep their peaks.
BRIMFUL_API void reset_peak(c10::Device device);

/// Gives memory that no tensor holds back to the system. CUDA: empties torch's cache (synchronises the device).
/// CPU: returns malloc's free pages, where malloc can (milliseconds).
BRIMFUL_API void release_cached(c10::Device device);

/// Puts brimful's allocator in front of torch's CPU allocator, once; later calls do nothing. Call it before other
/// threads allocate: torch reads its allocator without a lock. Memory from before is freed by whoever gave it.
/// @throws c10::Error if an allocator of a higher priority is in place
BRIMFUL_API void install();

/// The peak since construction. Scopes nest and overlap freely and leave the meaning of Stats::peak_bytes untouched.
/// No cost per allocation. CPU: exact. CUDA: opening a scope, like reset_peak, resets torch's own peak, so
/// torch.cuda.max_memory_allocated shows the peak since then; torch's resets inside a scope are lost to the scope.
class BRIMFUL_API PeakScope {
 public:
  explicit PeakScope(c10::Device device);
  ~PeakScope();
  PeakScope(const PeakScope&) = delete;
  PeakScope& operator=(const PeakScope&) = delete;

  int64_t peak_bytes() const;

 private:
  c10::Device device_;
  int64_t folded_bytes_ = 0;  // what the device's watermark had reached whenever it was lowered
};

/// While it lives, this thread's CPU allocations are counted but never refused. Nests. Destroy it on the same thread.
class BRIMFUL_API Unlimited {
 public:
  Unlimited() noexcept;
  ~Unlimited();
  Unlimited(const Unlimited&) = delete;
  Unlimited& operator=(const Unlimited&) = delete;
};

/// The same for every thread of the process: while a collective runs whose process group allocates in a thread of its own
/// (gloo's all_gather), where a refusal could only break the group.
class BRIMFUL_API UnlimitedEverywhere {
 public:
  UnlimitedEverywhere() noexcept;
  ~UnlimitedEverywhere();
  UnlimitedEverywhere(const UnlimitedEverywhere&) = delete;
  UnlimitedEverywhere& operator=(const UnlimitedEverywhere&) = delete;
};

}  // namespace brimful::memory
