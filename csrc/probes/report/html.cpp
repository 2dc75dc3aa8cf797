#include <brimful/probes/memory_report.h>
#include <nlohmann/json.hpp>

#include "base/whole_file.h"
#include "probes/page/page.h"
#include "probes/report/parts.h"

namespace brimful::probes {

memory::Peak peak_of(const memory::DeviceRecording& device) {
  return timeline_of(device, 1).peak;
}

std::string to_html(const std::vector<memory::Recording>& recordings) {
  const auto timelines = timelines_of(recordings);
  const auto title = timelines.size() == 1 ? "Memory of " + timelines[0].name : "Memory";
  return page_of(page_data("memory", title, recordings, timelines));
}

void write_report(const std::vector<memory::Recording>& recordings, const std::string& path) {
  write_file(path, to_html(recordings));
}

}  // namespace brimful::probes
