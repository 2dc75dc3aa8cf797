#pragma once
#include <brimful/probes/gpus.h>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>
#include "probes/gpu/nvml.h"

namespace brimful::probes {

/// What a GpuReader looks at beside the library.
struct GpuSurroundings {
  std::string root;  ///< in front of paths under /proc; empty: the system's own
  std::optional<std::string> visible_devices;
  std::string device_order;
  /// Hex digits of the UUIDs of CUDA's devices, in its order, where CUDA runs in this process.
  std::vector<std::string> cuda_uuids;
};
GpuSurroundings surroundings_now();

/// Keeps the library open between readings. One reading at a time; others wait.
class GpuReader {
 public:
  explicit GpuReader(std::string library) : path_(std::move(library)) {}
  GpuReport read(const GpuSurroundings& around);

 private:
  std::string start();
  GpuReport read_started(const GpuSurroundings& around) const;

  std::mutex mutex_;
  std::string path_;
  std::unique_ptr<nvml::Library> library_;
};

}  // namespace brimful::probes
