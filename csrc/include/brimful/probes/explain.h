#pragma once
#include <brimful/export.h>
#include <brimful/probes/op_ring.h>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace brimful::probes {

/// An error, and what was on standard error with it (kernels print their assertions there).
struct ErrorText {
  std::string text;
  std::vector<std::string>
      types;  ///< of the exception, the most derived first: "OutOfMemoryError", "RuntimeError"
};

/// What was measured around it; nothing or empty where it was not.
struct ErrorEvidence {
  std::optional<int64_t> free_bytes;       ///< of the CUDA device, before the call that failed
  std::optional<int64_t> workspace_bytes;  ///< what that call needed beside tensors, if it is known
  std::string cublas_config;               ///< CUBLAS_WORKSPACE_CONFIG
  std::optional<int> compute_major;        ///< of the CUDA device: 9 is Hopper
  bool refused = false;                    ///< torch's allocator refused something in the same step
  std::optional<int64_t> shm_free_bytes;   ///< of /dev/shm
  std::optional<int64_t> oom_kills;        ///< by the kernel in this process's cgroup
  std::string allocator_settings;          ///< PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF
  std::vector<IndexFinding> indices;
  std::vector<OpRecord> operators;  ///< oldest first
};

struct Explanation {
  /// out_of_memory, hidden_out_of_memory, library, index, value, device_lost, collective_timeout, peer_lost, collective,
  /// shared_memory, worker_killed, worker_failed, killed, other_rank, cuda_in_fork, open_files, full_disk,
  /// kernel_limit, ended_in_a_thread, other.
  std::string kind;
  std::optional<bool> is_memory;  ///< nothing: not known
  std::string cause;
  std::string remedy;
  std::vector<std::string>
      evidence;  ///< from the error's text and from what was measured, each a line
};

/// By text, types and evidence alone: the same for the same input. An error that nothing is known about is `other` with its
/// own text: a wrong explanation is worse than none.
BRIMFUL_API Explanation explain_error(const ErrorText& error, const ErrorEvidence& evidence = {});

/// Of this process now: the device's free memory, /dev/shm, kills, and what op_ring kept. Waits for no device.
BRIMFUL_API ErrorEvidence evidence_now();

/// Cause, remedy and evidence for people.
BRIMFUL_API std::string to_string(const Explanation& explanation);

}  // namespace brimful::probes
