#pragma once
#include <brimful/export.h>
#include <brimful/probes/gpus.h>
#include <brimful/probes/processes.h>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

/// One look at everything that holds memory: a process and what it started, the host and the cgroup's limit, torch's
/// allocators, the GPUs.
namespace brimful::probes {

struct HostMemory {
  std::optional<int64_t> total_bytes;
  std::optional<int64_t> available_bytes;
  /// The tightest limit of this process's cgroups; nothing where there is none. What it counts includes page cache.
  std::optional<int64_t> limit_bytes;
  std::optional<int64_t> limit_free_bytes;
  std::string limit_where;
  std::optional<int64_t>
      shm_total_bytes;  ///< /dev/shm, through which DataLoader workers pass batches
  std::optional<int64_t> shm_free_bytes;
  double cpus = 0;  ///< that this process may use
};

/// What torch's allocator on a device holds for this process.
struct TorchMemory {
  std::string device;  ///< "cpu", "cuda:0"
  int64_t used_bytes = 0;
  int64_t peak_bytes = 0;
  int64_t reserved_bytes = 0;
  std::optional<int64_t> limit_bytes;
};

struct Sample {
  double unix_s = 0;
  std::optional<Process> process;
  std::vector<Process> children;  ///< and theirs
  std::vector<Process> largest;   ///< where no process was asked for: those with the most resident
  HostMemory host;
  std::vector<TorchMemory> torch;  ///< CUDA devices once CUDA is in use: looking makes no context
  GpuReport gpus;
};

/// Of process `pid`: 0 is this one, and has torch's memory too; a negative number takes the ten largest processes in its
/// place. Reads files of /proc and asks NVML: about a millisecond, more for huge or many processes. Any thread.
BRIMFUL_API Sample take_sample(int64_t pid = 0);

/// One number of a sample: "gpu", {{"gpu", "0"}, {"uuid", "GPU-..."}}, "used_bytes". What is not known is left out.
struct Metric {
  std::string group;
  std::vector<std::pair<std::string, std::string>> labels;
  std::string quantity;
  double value = 0;
};
BRIMFUL_API std::vector<Metric> metrics_of(const Sample& sample);

/// One line; what is not known is null.
BRIMFUL_API std::string to_json(const Sample& sample);
BRIMFUL_API std::string to_json(const GpuReport& report);
/// Prometheus' text format: gauges such as brimful_gpu_used_bytes{gpu="0",uuid="GPU-..."} 1048576.
BRIMFUL_API std::string to_prometheus(const Sample& sample);
/// For people. What is not known is "unknown".
BRIMFUL_API std::string to_table(const Sample& sample);

}  // namespace brimful::probes
