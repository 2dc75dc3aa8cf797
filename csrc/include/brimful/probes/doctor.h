#pragma once
#include <brimful/export.h>
#include <brimful/probes/gpus.h>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace brimful::probes {

enum class Health : uint8_t { ok, warn, fail };
/// "ok", "warn", "fail".
BRIMFUL_API const char* name_of(Health health);

/// One thing that was looked at.
struct Finding {
  std::string name;
  Health health = Health::ok;
  std::string found;
  std::string remedy;  ///< empty if all is well
};

/// What this library was built with.
struct BuildFacts {
  std::string version;  ///< BRIMFUL_VERSION, which says for which torch
  bool cuda = false;
  bool nccl = false;
  bool gloo = false;  ///< for process groups that brimful makes itself
};
BRIMFUL_API BuildFacts build_facts();
/// `wanted`: torch is built with CUDA, so that a brimful without it is worth a warning.
BRIMFUL_API Finding check_build(const BuildFacts& facts, bool wanted);

/// What bounds a training process here; nothing where it cannot be read, or is unlimited.
struct LimitFacts {
  std::optional<int64_t> memory_bytes;  ///< what tensors may take
  std::string memory_where;
  bool memory_limited = false;  ///< by a cgroup or RLIMIT_AS, not only by what there is
  std::optional<int64_t> shm_total_bytes;
  std::optional<int64_t> shm_free_bytes;
  std::optional<int64_t> open_files;
  std::optional<int64_t> processes;
  std::optional<int64_t> locked_bytes;
  double cpus = 0;
  int64_t port = 29500;  ///< MASTER_PORT, or torchrun's default
  bool port_is_free = true;
};
/// Reads a few files, and binds the port for an instant.
BRIMFUL_API LimitFacts limits_now();

BRIMFUL_API std::vector<Finding> check_limits(const LimitFacts& facts);
/// `wanted`: torch is built with CUDA, so that a machine without GPUs is worth a warning.
BRIMFUL_API std::vector<Finding> check_gpus(const GpuReport& report, bool wanted);

}  // namespace brimful::probes
