#pragma once
#include <brimful/export.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>

namespace brimful::memory {

/// What takes a device's memory beside the tensors that stats() counts; nothing where it is not known.
struct HeldByOthers {
  /// This process's. CPU: resident memory that is no tensor; CUDA: torch's cache.
  std::optional<int64_t> process_bytes;
  /// Of other processes; CUDA: contexts and libraries, this process's own too.
  std::optional<int64_t> others_bytes;
  std::optional<int64_t> free_bytes;
  std::string where;  ///< who says so
};

/// Reads a few small files of /proc and /sys/fs/cgroup, or asks the driver. Any thread. Never throws.
BRIMFUL_API HeldByOthers held_by_others(c10::Device device) noexcept;

/// The CPU's, with `root` in front of every path.
BRIMFUL_API HeldByOthers held_by_others_under(const std::string& root, int64_t tensor_bytes);

}  // namespace brimful::memory
