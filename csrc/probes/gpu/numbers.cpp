#include "probes/gpu/numbers.h"
#include <unistd.h>
#include <algorithm>
#include <array>
#include "base/units.h"
#include "memory/system_bounds.h"
#include "probes/host/proc_files.h"

namespace brimful::probes {
namespace {

using namespace nvml;

// More than a context takes: so much in use without a process means that the driver does not name them to us.
constexpr int64_t kHiddenBytes = int64_t{64} << 20;

bool lost(nvml::Status status) {
  return status == kUninitialized || status == kDriverNotLoaded || status == kGpuIsLost ||
         status == kResetRequired;
}

/// One device's questions. The first answer that says that the device is lost stays.
class Asker {
 public:
  Asker(const Library& library, Device device) : library_(library), device_(device) {}

  std::string text(const char* function) {
    std::array<char, kTextSize> buffer{};
    const nvml::Status status = ask({function}, buffer.data(), kTextSize);
    buffer.back() = '\0';
    return status == kOk ? buffer.data() : "";
  }
  std::optional<uint32_t> number(const char* function) {
    uint32_t value = 0;
    return ask({function}, &value) == kOk ? std::optional(value) : std::nullopt;
  }
  template <typename... Args>
  nvml::Status ask(std::initializer_list<const char*> names, Args... args) {
    const nvml::Status status = library_.call(names, device_, args...);
    if (lost(status)) {
      lost_ = status;
    }
    return status;
  }
  std::optional<nvml::Status> lost_status() const { return lost_; }

 private:
  const Library& library_;
  Device device_;
  std::optional<nvml::Status> lost_;
};

std::optional<int64_t> known_bytes(uint64_t bytes) {
  constexpr auto kMost = uint64_t{1} << 62;
  return bytes < kMost ? std::optional(static_cast<int64_t>(bytes)) : std::nullopt;
}

std::optional<double> thousandths(std::optional<uint32_t> number) {
  return number ? std::optional(static_cast<double>(*number) / 1000) : std::nullopt;
}

std::optional<bool> yes_or_no(std::optional<uint32_t> number) {
  return number ? std::optional(*number != 0) : std::nullopt;
}

nvml::Status read_memory(Asker& asker, Gpu& gpu) {
  MemoryV2 newer{};
  newer.version = kMemoryV2;
  nvml::Status status = asker.ask({"nvmlDeviceGetMemoryInfo_v2"}, &newer);
  if (status == kOk && newer.total > 0) {
    gpu.total_bytes = known_bytes(newer.total);
    gpu.used_bytes = known_bytes(newer.used);
    gpu.free_bytes = known_bytes(newer.free);
    gpu.reserved_bytes = known_bytes(newer.reserved);
    return status;
  }
  Memory older{};
  status = asker.ask({"nvmlDeviceGetMemoryInfo"}, &older);
  if (status == kOk && older.total > 0) {
    gpu.total_bytes = known_bytes(older.total);
    gpu.used_bytes = known_bytes(older.used);
    gpu.free_bytes = known_bytes(older.free);
    return status;
  }
  return status == kOk ? kNotSupported : status;
}

/// GPUs that share the host's memory have none of their own to report.
void take_host_memory(const std::string& root, Gpu& gpu) {
  const auto meminfo = memory::read_or_empty(root + "/proc/meminfo");
  const auto total = memory::number_after(meminfo, "MemTotal:");
  const auto available = memory::number_after(meminfo, "MemAvailable:");
  if (!total || !available) {
    return;
  }
  gpu.unified_memory = true;
  gpu.total_bytes = *total * kKiB;
  gpu.free_bytes = *available * kKiB;
  gpu.used_bytes = (*total - *available) * kKiB;
}

/// Calls until the list fits: processes come and go between two calls.
template <typename Info>
std::optional<std::vector<GpuProcess>> list_processes(Asker& asker,
                                                      std::initializer_list<const char*> names) {
  std::vector<Info> infos;
  for (int attempt = 0; attempt < 4; ++attempt) {
    auto count = static_cast<uint32_t>(infos.size());
    const nvml::Status status = asker.ask(names, &count, infos.data());
    if (status == kInsufficientSize) {
      infos.resize(size_t{count} * 2 + 8);
      continue;
    }
    if (status != kOk) {
      return std::nullopt;
    }
    infos.resize(std::min<size_t>(count, infos.size()));
    std::vector<GpuProcess> found;
    found.reserve(infos.size());
    for (const auto& info : infos) {
      found.push_back(
          {info.pid, info.used == kNotAvailable ? std::nullopt : known_bytes(info.used)});
    }
    return found;
  }
  return std::nullopt;
}

std::optional<std::vector<GpuProcess>> read_processes(Asker& asker) {
  if (auto found = list_processes<ProcessV2>(asker, {"nvmlDeviceGetComputeRunningProcesses_v3",
                                                     "nvmlDeviceGetComputeRunningProcesses_v2"})) {
    return found;
  }
  return list_processes<ProcessV1>(asker, {"nvmlDeviceGetComputeRunningProcesses"});
}

void judge_processes(bool pids_are_ours, Gpu& gpu) {
  if (!gpu.processes) {
    return;
  }
  if (!pids_are_ours) {
    if (gpu.processes->empty() && gpu.used_bytes.value_or(0) > kHiddenBytes) {
      gpu.processes = std::nullopt;  // the driver hides those that have no pid in here
    }
    return;
  }
  gpu.own_bytes = 0;
  for (const auto& process : *gpu.processes) {
    if (process.pid == getpid()) {
      gpu.own_bytes = process.used_bytes;
      return;
    }
  }
}

void read_numbers(Asker& asker, const GpuSurroundings& around, Gpu& gpu) {
  const bool instance = gpu.mig_index.has_value();
  gpu.uuid = asker.text("nvmlDeviceGetUUID");
  gpu.name = asker.text("nvmlDeviceGetName");
  gpu.serial = instance ? "" : asker.text("nvmlDeviceGetSerial");
  const nvml::Status memory = read_memory(asker, gpu);
  if (memory == kNotSupported && !instance && !gpu.mig_mode) {
    take_host_memory(around.root, gpu);
  }
  if (!instance) {  // these belong to the whole GPU
    Utilization rates{};
    if (asker.ask({"nvmlDeviceGetUtilizationRates"}, &rates) == kOk && rates.gpu <= 100) {
      gpu.busy = static_cast<double>(rates.gpu) / 100;
    }
    uint32_t celsius = 0;
    if (asker.ask({"nvmlDeviceGetTemperature"}, kTemperatureOfGpu, &celsius) == kOk) {
      gpu.temperature_c = celsius;
    }
    gpu.power_w = thousandths(asker.number("nvmlDeviceGetPowerUsage"));
    gpu.power_limit_w = thousandths(asker.number("nvmlDeviceGetEnforcedPowerLimit"));
    gpu.display_mode = yes_or_no(asker.number("nvmlDeviceGetDisplayMode"));
    gpu.display_active = yes_or_no(asker.number("nvmlDeviceGetDisplayActive"));
  }
  gpu.processes = read_processes(asker);
  judge_processes(pids_are_the_hosts_under(around.root), gpu);
  if (const auto status = asker.lost_status()) {
    const auto index = gpu.index;
    const auto mig_index = gpu.mig_index;
    const auto uuid = gpu.uuid;
    gpu = {};  // what was read before it went is of no use
    gpu.index = index;
    gpu.mig_index = mig_index;
    gpu.uuid = uuid;
    gpu.problem = nvml::to_string(*status);
  } else if (memory != kOk && memory != kNotSupported) {
    gpu.problem = nvml::to_string(memory);
  }
}

}  // namespace

void read_gpu(const Library& library, const GpuSurroundings& around, int index,
              std::vector<Gpu>& gpus) {
  Gpu gpu;
  gpu.index = index;
  Device device = nullptr;
  const nvml::Status status =
      library.call({"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"},
                   static_cast<uint32_t>(index), &device);
  if (status != kOk) {
    gpu.problem = nvml::to_string(status);
    gpus.push_back(gpu);
    return;
  }
  Asker asker(library, device);
  uint32_t current = 0;
  uint32_t pending = 0;
  gpu.mig_mode = asker.ask({"nvmlDeviceGetMigMode"}, &current, &pending) == kOk && current == 1;
  const bool divided = gpu.mig_mode;
  read_numbers(asker, around, gpu);
  gpus.push_back(gpu);
  const auto most = divided ? asker.number("nvmlDeviceGetMaxMigDeviceCount") : std::nullopt;
  for (uint32_t i = 0; i < most.value_or(0); ++i) {
    Device instance = nullptr;
    if (asker.ask({"nvmlDeviceGetMigDeviceHandleByIndex"}, i, &instance) != kOk) {
      continue;  // not every place is taken
    }
    Gpu part;
    part.index = index;
    part.mig_index = static_cast<int>(i);
    Asker instance_asker(library, instance);
    read_numbers(instance_asker, around, part);
    gpus.push_back(part);
  }
}

}  // namespace brimful::probes
