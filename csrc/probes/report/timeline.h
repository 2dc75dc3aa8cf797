#pragma once
#include <brimful/memory/recording.h>
#include <array>
#include <cstdint>
#include <vector>

namespace brimful::probes {

constexpr size_t kTopSites = 9;

/// Some events in a row, at the moment among them when the most was in use.
struct TimelineColumn {
  int64_t time_ns = 0;  ///< of the first of them
  int64_t step = 0;
  memory::Phase phase = memory::Phase::other;
  memory::CategoryBytes by_category{};
  std::array<int64_t, kTopSites> by_site{};  ///< of Timeline::sites
  int64_t used_bytes() const;
};

struct Timeline {
  memory::Peak peak;  ///< sites and modules numbered as in the recording
  int64_t peak_ns = 0;
  std::vector<uint32_t>
      sites;  ///< with the highest peaks, each at its own moment; the highest first
  std::vector<TimelineColumn> columns;
};

/// Work in proportion to the events, whatever the columns: at least one, and about as many as asked for at most.
Timeline timeline_of(const memory::DeviceRecording& device, size_t columns);

}  // namespace brimful::probes
