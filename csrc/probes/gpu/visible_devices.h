#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace brimful::probes {

/// What CUDA can be given: GPUs in NVML's order, with the instances of those that are divided.
struct PhysicalGpu {
  std::string uuid;
  std::string name;
  std::vector<std::string> mig_uuids;
};

struct VisibleDevice {
  size_t gpu = 0;
  std::optional<size_t> mig;
  bool operator==(const VisibleDevice&) const = default;
};

/// In CUDA's order. Nothing where that order cannot be known: `problem` says why.
struct VisibleDevices {
  std::optional<std::vector<VisibleDevice>> devices;
  std::string problem;
};

/// What CUDA makes of CUDA_VISIBLE_DEVICES (nothing: not set) and CUDA_DEVICE_ORDER, by its programming guide: numbers or
/// UUIDs, which may be shortened as long as one GPU fits; the list ends before the first entry that is wrong; an entry
/// twice leaves no device at all; at most one MIG instance. Numbers are NVML's only under PCI_BUS_ID or where all GPUs are
/// of one kind: CUDA puts the fastest first.
VisibleDevices visible_devices(const std::optional<std::string>& variable, const std::string& order,
                               const std::vector<PhysicalGpu>& gpus);

}  // namespace brimful::probes
