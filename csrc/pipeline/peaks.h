#pragma once
#include <brimful/memory/stats.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "memory/is_counted.h"
#include "pipeline/pipeline_state.h"

namespace brimful::pipeline {

/// Of the device whose peak is the largest; nothing where none is counted.
inline std::optional<std::pair<c10::Device, int64_t>> fullest(
    const std::vector<std::pair<c10::Device, int64_t>>& peaks) {
  const auto most = std::max_element(
      peaks.begin(), peaks.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == peaks.end() ? std::nullopt : std::optional(*most);
}

/// The peak of each device whose memory is counted, while it lives.
class Peaks {
 public:
  explicit Peaks(const std::vector<c10::Device>& devices) : devices_(distinct(devices)) {
    std::erase_if(devices_, [](c10::Device device) { return !memory::is_counted(device); });
    for (const auto device : devices_) {
      scopes_.push_back(std::make_unique<memory::PeakScope>(device));
    }
  }
  std::vector<std::pair<c10::Device, int64_t>> bytes() const {
    std::vector<std::pair<c10::Device, int64_t>> result;
    result.reserve(devices_.size());
    for (size_t i = 0; i < devices_.size(); ++i) {
      result.emplace_back(devices_[i], scopes_[i]->peak_bytes());
    }
    return result;
  }

 private:
  std::vector<c10::Device> devices_;
  std::vector<std::unique_ptr<memory::PeakScope>> scopes_;
};

}  // namespace brimful::pipeline
