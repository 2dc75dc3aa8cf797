#include <brimful/memory/stats.h>
#include <brimful/probes/sample.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <chrono>
#include "base/units.h"
#include "memory/cuda.h"
#include "memory/system_bounds.h"

namespace brimful::probes {
namespace {

constexpr size_t kLargestShown = 10;

HostMemory read_host() {
  HostMemory host;
  const auto meminfo = memory::read_or_empty("/proc/meminfo");
  if (const auto total = memory::number_after(meminfo, "MemTotal:")) {
    host.total_bytes = *total * kKiB;
  }
  if (const auto available = memory::number_after(meminfo, "MemAvailable:")) {
    host.available_bytes = *available * kKiB;
  }
  const auto process = memory::parse_status(memory::read_or_empty("/proc/self/status"));
  for (const auto& bound : memory::cgroup_bounds("", process)) {
    if (!host.limit_free_bytes || bound.free_bytes < *host.limit_free_bytes) {
      host.limit_bytes = bound.bytes;
      host.limit_free_bytes = bound.free_bytes;
      host.limit_where = bound.where;
    }
  }
  struct statvfs shm {};
  if (statvfs("/dev/shm", &shm) == 0 && shm.f_blocks > 0) {
    const auto block = static_cast<int64_t>(shm.f_frsize);
    host.shm_total_bytes = static_cast<int64_t>(shm.f_blocks) * block;
    host.shm_free_bytes = static_cast<int64_t>(shm.f_bavail) * block;
  }
  host.cpus = usable_cpus();
  return host;
}

void add(std::vector<TorchMemory>& devices, c10::Device device) {
  if (const auto stats = memory::stats(device); stats.counted) {
    devices.push_back({device.str(), stats.used_bytes, stats.peak_bytes, stats.reserved_bytes,
                       stats.limit_bytes});
  }
}

std::vector<TorchMemory> read_torch() {
  std::vector<TorchMemory> devices;
  add(devices, c10::Device(c10::DeviceType::CPU));
  const auto cuda = memory::cuda_uuids().size();
  for (size_t i = 0; i < cuda; ++i) {
    add(devices, c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(i)));
  }
  return devices;
}

}  // namespace

Sample take_sample(int64_t pid) {
  Sample sample;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  sample.unix_s = std::chrono::duration<double>(now).count();
  if (pid >= 0) {
    const auto whose = pid == 0 ? getpid() : pid;
    sample.process = read_process(whose);
    sample.children = read_descendants(whose);
  } else {
    sample.largest = largest_processes(kLargestShown);
  }
  sample.host = read_host();
  if (pid == 0 || pid == getpid()) {
    sample.torch = read_torch();
  }
  sample.gpus = read_gpus();
  return sample;
}

}  // namespace brimful::probes
