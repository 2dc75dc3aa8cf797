#include <brimful/probes/explain.h>
#include <brimful/step/oom.h>
#include <sys/statvfs.h>
#include "base/environment.h"
#include "memory/cuda.h"
#include "memory/system_bounds.h"

namespace brimful::probes {
namespace {

std::optional<int64_t> kernel_kills() {
  const auto folders = memory::cgroup_folders(memory::read_or_empty("/proc/self/cgroup"),
                                              memory::read_or_empty("/proc/self/mountinfo"),
                                              memory::LimitSource::cgroup_v2);
  return folders.empty()
             ? std::nullopt
             : memory::number_after(memory::read_or_empty(folders.front() + "/memory.events"),
                                    "oom_kill ");
}

/// The first of them that is set.
std::string variable(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (auto value = environment(name); !value.empty()) {
      return value;
    }
  }
  return "";
}

}  // namespace

ErrorEvidence evidence_now() {
  ErrorEvidence evidence;
  const auto memory = memory_evidence();
  evidence.free_bytes = memory.free_bytes;
  evidence.refused = memory.refused;
  evidence.operators = op_ring_records();
  evidence.indices = op_ring_index_findings();
  for (const auto& record : evidence.operators) {  // the last is the one that failed
    evidence.free_bytes = record.free_bytes ? record.free_bytes : evidence.free_bytes;
  }
  struct statvfs shm {};
  if (statvfs("/dev/shm", &shm) == 0) {
    evidence.shm_free_bytes =
        static_cast<int64_t>(shm.f_bavail) * static_cast<int64_t>(shm.f_frsize);
  }
  evidence.oom_kills = kernel_kills();
  evidence.allocator_settings = variable({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"});
  evidence.cublas_config = variable({"CUBLAS_WORKSPACE_CONFIG"});
  evidence.compute_major = memory::cuda_compute_major();
  return evidence;
}

}  // namespace brimful::probes
