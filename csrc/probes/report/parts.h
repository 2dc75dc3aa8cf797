#pragma once
#include <brimful/memory/recording.h>

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "probes/report/timeline.h"

/// Parts of the pages of memory_report.h.
namespace brimful::probes {

struct PageTimeline {
  std::string name;  ///< "rank 0, cpu"
  const memory::Recording* recording = nullptr;
  const memory::DeviceRecording* device = nullptr;
  Timeline timeline;
};

/// For each device of each recording; fewer columns where there are many.
std::vector<PageTimeline> timelines_of(const std::vector<memory::Recording>& recordings);

/// What both kinds of page have: the recordings' files and origins, and the charts' data.
nlohmann::ordered_json page_data(const char* kind, const std::string& title,
                                 const std::vector<memory::Recording>& recordings,
                                 const std::vector<PageTimeline>& timelines);

}  // namespace brimful::probes
