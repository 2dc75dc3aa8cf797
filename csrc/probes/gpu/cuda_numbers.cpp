#include "probes/gpu/cuda_numbers.h"
#include <algorithm>
#include <cctype>
#include "probes/gpu/visible_devices.h"

namespace brimful::probes {
namespace {

/// "GPU-1a2b-..." as CUDA gives it: hex digits only.
std::string digits_of(const std::string& uuid) {
  std::string digits;
  for (size_t i = std::min(uuid.find('-'), uuid.size()); i < uuid.size(); ++i) {
    if (std::isxdigit(static_cast<unsigned char>(uuid[i])) != 0) {
      digits += static_cast<char>(std::tolower(static_cast<unsigned char>(uuid[i])));
    }
  }
  return digits;
}

}  // namespace

std::string number_as_cuda_does(const GpuSurroundings& around, std::vector<Gpu>& gpus) {
  if (!around.cuda_uuids.empty()) {
    for (auto& gpu : gpus) {
      const auto at =
          std::find(around.cuda_uuids.begin(), around.cuda_uuids.end(), digits_of(gpu.uuid));
      if (at != around.cuda_uuids.end()) {
        gpu.cuda_index = static_cast<int>(at - around.cuda_uuids.begin());
      }
    }
    return "";
  }
  std::vector<PhysicalGpu> physical;
  std::vector<std::vector<Gpu*>> instances;
  std::vector<Gpu*> whole;
  for (auto& gpu : gpus) {
    if (!gpu.mig_index) {
      physical.push_back({gpu.uuid, gpu.name, {}});
      whole.push_back(&gpu);
      instances.emplace_back();
    } else {
      physical.back().mig_uuids.push_back(gpu.uuid);
      instances.back().push_back(&gpu);
    }
  }
  const auto visible = visible_devices(around.visible_devices, around.device_order, physical);
  for (size_t i = 0; i < visible.devices.value_or(std::vector<VisibleDevice>()).size(); ++i) {
    const auto& device = (*visible.devices)[i];
    auto* gpu = device.mig ? instances[device.gpu][*device.mig] : whole[device.gpu];
    gpu->cuda_index = static_cast<int>(i);
  }
  return visible.problem;
}

}  // namespace brimful::probes
