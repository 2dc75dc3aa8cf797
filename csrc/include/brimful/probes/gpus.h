#pragma once
#include <brimful/export.h>
#include <c10/core/Device.h>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// What NVIDIA's driver says about the GPUs of this machine, read through NVML in this process: no nvidia-smi, and no
/// CUDA context. libnvidia-ml.so.1 is looked for when it is first asked for, never linked.
namespace brimful::probes {

/// A process that the driver has on a GPU.
struct GpuProcess {
  int64_t pid = 0;  ///< as the driver counts: in a container this is the host's pid
  std::optional<int64_t> used_bytes;
};

/// A GPU, or a MIG instance of one. What the driver does not report, or not to us, is nothing, never 0.
struct Gpu {
  int index = 0;                  ///< NVML's, by PCI bus; not CUDA's
  std::optional<int> mig_index;   ///< of an instance of GPU `index`
  std::optional<int> cuda_index;  ///< what CUDA calls it in this process, where that is certain
  std::string uuid;               ///< "GPU-..." or "MIG-..."; empty where unknown
  std::string name;
  std::string serial;
  bool mig_mode = false;        ///< the GPU is divided: its instances follow it
  bool unified_memory = false;  ///< shares the host's memory, whose bytes stand here

  std::optional<int64_t> total_bytes;
  std::optional<int64_t>
      used_bytes;  ///< by all processes; of drivers before 510 also what is reserved
  std::optional<int64_t> free_bytes;
  std::optional<int64_t> reserved_bytes;  ///< by the driver for itself
  /// Share of the last sample period (1/6 s to 1 s) in which any kernel ran. It is not occupancy: one small kernel
  /// that never ends gives 1.
  std::optional<double> busy;
  std::optional<double> temperature_c;
  std::optional<double> power_w;
  std::optional<double> power_limit_w;
  std::optional<bool> display_mode;    ///< a display is attached
  std::optional<bool> display_active;  ///< a display's memory is allocated

  std::optional<std::vector<GpuProcess>> processes;
  /// This process's. Nothing in a container: pids from outside cannot be distinguished from pids of inside.
  std::optional<int64_t> own_bytes;
  std::string problem;  ///< why it reports nothing, if so ("GPU is lost")
};

struct GpuReport {
  std::vector<Gpu> gpus;
  std::string driver;  ///< its version; empty where unknown
  std::string
      problem;  ///< why there are none, or why CUDA's numbers are not known; empty if all is well
};

/// Reads them now: well below a millisecond a GPU once the library is open (tens of milliseconds the first time). Never
/// throws for what a driver does. A driver that went away is asked for again at the next call. Any thread; safe after a fork.
/// BRIMFUL_NVML names another library, for tests.
BRIMFUL_API GpuReport read_gpus();

/// What this process has of CUDA's device `cuda_index` beside the `reserved_bytes` of torch's allocator: the context, its
/// kernels, and what libraries take by themselves (NCCL's buffers). Nothing where the driver does not report it. Pure.
BRIMFUL_API std::optional<int64_t> context_bytes(const GpuReport& report, int cuda_index,
                                                 int64_t reserved_bytes);
/// The same as things stand; nothing for the CPU. Any thread; waits for no device.
/// @throws c10::ValueError if there is no such device
BRIMFUL_API std::optional<int64_t> context_bytes(c10::Device device);

}  // namespace brimful::probes
