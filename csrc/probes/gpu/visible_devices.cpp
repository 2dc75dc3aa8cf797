#include "probes/gpu/visible_devices.h"
#include <algorithm>
#include <charconv>

namespace brimful::probes {
namespace {

std::vector<std::string> entries_of(const std::string& text) {
  std::vector<std::string> entries;
  for (size_t begin = 0; begin <= text.size();) {
    const auto end = std::min(text.find(',', begin), text.size());
    auto entry = text.substr(begin, end - begin);
    entry.erase(0, std::min(entry.find_first_not_of(" \t"), entry.size()));
    entry.erase(entry.find_last_not_of(" \t") + 1);
    entries.push_back(entry);
    begin = end + 1;
  }
  return entries;
}

std::optional<size_t> number_of(const std::string& entry) {
  size_t number = 0;
  const auto* end = entry.data() + entry.size();
  const auto parsed = std::from_chars(entry.data(), end, number);
  return parsed.ec == std::errc() && parsed.ptr == end && !entry.empty() ? std::optional(number)
                                                                         : std::nullopt;
}

/// The device of a whole GPU: of a divided one, CUDA takes the first instance.
VisibleDevice whole(const std::vector<PhysicalGpu>& gpus, size_t index) {
  return {index, gpus[index].mig_uuids.empty() ? std::nullopt : std::optional<size_t>(0)};
}

/// The only one that begins with `entry`.
std::optional<VisibleDevice> by_uuid(const std::vector<PhysicalGpu>& gpus,
                                     const std::string& entry) {
  std::vector<VisibleDevice> found;
  for (size_t gpu = 0; gpu < gpus.size(); ++gpu) {
    if (entry.starts_with("GPU-") && gpus[gpu].uuid.starts_with(entry)) {
      found.push_back(whole(gpus, gpu));
    }
    for (size_t mig = 0; mig < gpus[gpu].mig_uuids.size(); ++mig) {
      if (entry.starts_with("MIG-") && gpus[gpu].mig_uuids[mig].starts_with(entry)) {
        found.push_back({gpu, mig});
      }
    }
  }
  return found.size() == 1 ? std::optional(found.front()) : std::nullopt;
}

bool order_is_known(const std::string& order, const std::vector<PhysicalGpu>& gpus) {
  return order == "PCI_BUS_ID" || std::all_of(gpus.begin(), gpus.end(), [&](const auto& gpu) {
           return gpu.name == gpus.front().name;
         });
}

/// Where one instance is among them, CUDA shows that one alone.
void keep_one_instance(std::vector<VisibleDevice>& devices) {
  const auto mig = std::find_if(devices.begin(), devices.end(),
                                [](const auto& device) { return device.mig.has_value(); });
  if (mig != devices.end()) {
    devices = {*mig};
  }
}

}  // namespace

VisibleDevices visible_devices(const std::optional<std::string>& variable, const std::string& order,
                               const std::vector<PhysicalGpu>& gpus) {
  VisibleDevices visible;
  const char* unknown_order =
      "CUDA may number these GPUs otherwise; set CUDA_DEVICE_ORDER=PCI_BUS_ID to know";
  std::vector<VisibleDevice> devices;
  if (!variable) {
    if (!order_is_known(order, gpus)) {
      return {std::nullopt, unknown_order};
    }
    for (size_t i = 0; i < gpus.size(); ++i) {
      devices.push_back(whole(gpus, i));
    }
    keep_one_instance(devices);
    return {devices, ""};
  }
  std::optional<bool> by_number;
  for (const auto& entry : entries_of(*variable)) {
    const auto number = number_of(entry);
    if (by_number.value_or(number.has_value()) != number.has_value()) {
      visible.problem = "CUDA_VISIBLE_DEVICES mixes numbers and UUIDs: it ends before " + entry;
      break;
    }
    by_number = number.has_value();
    if (number && !order_is_known(order, gpus)) {
      return {std::nullopt, unknown_order};
    }
    const auto device =
        number ? (*number < gpus.size() ? std::optional(whole(gpus, *number)) : std::nullopt)
               : by_uuid(gpus, entry);
    if (!device) {
      if (!entry.empty() && entry != "-1" && entry != "NoDevFiles") {
        visible.problem = "CUDA_VISIBLE_DEVICES names no GPU here: it ends before " + entry;
      }
      break;
    }
    if (std::find(devices.begin(), devices.end(), *device) != devices.end()) {
      visible.problem = "CUDA_VISIBLE_DEVICES names a GPU twice, so CUDA shows none: " + entry;
      devices.clear();
      break;
    }
    devices.push_back(*device);
  }
  keep_one_instance(devices);
  visible.devices = devices;
  return visible;
}

}  // namespace brimful::probes
