#pragma once
#include <brimful/export.h>
#include <c10/core/Device.h>
#include <cstdint>
#include <string>

namespace brimful::memory {

/// What bounds the CPU memory of a process.
enum class LimitSource : uint8_t { cgroup_v2, cgroup_v1, address_space, available };

/// "cgroup v2", "cgroup v1", "RLIMIT_AS", "MemAvailable".
BRIMFUL_API const char* name_of(LimitSource source);

/// What tensors may take before the system ends the process, or refuses it memory.
struct SystemLimit {
  int64_t limit_bytes = 0;  ///< for set_limit: of all tensors, those that live now included
  /// What the bound leaves to this process beyond what is in use: its share where several ranks share the host.
  int64_t free_bytes = 0;
  /// Of free_bytes, kept back for what is no tensor (Python, libraries, threads, malloc's fragments): a twentieth, at
  /// least 64 MiB, at most a half.
  int64_t margin_bytes = 0;
  int64_t bound_bytes = 0;  ///< the bound as the system states it, of all that it counts
  LimitSource source = LimitSource::available;
  std::string where;  ///< the file or the resource that states it
};

/// The tightest of: memory.max (cgroup v2) and memory.limit_in_bytes (v1) of this process's cgroup and of all above it
/// that the process can see, RLIMIT_AS less the address space in use, and MemAvailable. Page cache that a cgroup has not
/// used lately counts as free, swap does not count. Where torchrun's LOCAL_WORLD_SIZE says that ranks share the host,
/// each gets an equal share of what is free, except under RLIMIT_AS, which is each process's own.
/// Reads a few small files of /proc and /sys/fs/cgroup; installs the allocator; callable from any thread.
/// A snapshot: what other processes take afterwards is not in it.
/// @throws c10::NotImplementedError where none of them can be read
BRIMFUL_API SystemLimit system_limit();

/// Gives malloc's free pages back, and sets `device`'s limit to system_limit().limit_bytes; returns what decided.
/// Call it when model, optimizer and data loaders are there, and again when other processes have come or gone.
/// @throws c10::ValueError for a device other than the CPU; otherwise as system_limit()
BRIMFUL_API SystemLimit set_limit_auto(c10::Device device);

}  // namespace brimful::memory
