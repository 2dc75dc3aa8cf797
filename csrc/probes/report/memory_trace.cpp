#include <brimful/probes/memory_report.h>
#include <nlohmann/json.hpp>

#include "base/chrome_trace.h"
#include "probes/report/timeline.h"

namespace brimful::probes {
namespace {

constexpr size_t kTraceColumns = 20'000;

double us(int64_t ns) {
  return static_cast<double>(ns) / 1e3;
}

nlohmann::ordered_json values_of(const memory::CategoryBytes& bytes) {
  nlohmann::ordered_json values;
  for (size_t k = 0; k < bytes.size(); ++k) {
    values[name_of(static_cast<memory::Category>(k))] = bytes[k];
  }
  return values;
}

void add_steps(ChromeTrace& trace, int process, const memory::Recording& recording,
               const memory::DeviceRecording& device) {
  int64_t begin_ns = 0;
  int64_t step = device.first_step;
  const auto add = [&](int64_t end_ns) {
    trace.slice(process, 0, "step " + std::to_string(step), "step",
                us(recording.origin.unix_ns + begin_ns), us(end_ns - begin_ns));
  };
  for (const auto& event : device.events) {
    if (event.kind == memory::EventKind::step) {
      add(event.time_ns);
      begin_ns = event.time_ns;
      step = event.block;
    }
  }
  add(recording.duration_ns);
}

}  // namespace

std::string to_chrome_trace(const std::vector<memory::Recording>& recordings) {
  ChromeTrace trace;
  int process = 0;
  for (const auto& recording : recordings) {
    for (const auto& device : recording.devices) {
      trace.name_process(process, "rank " + std::to_string(recording.rank) + ", " + device.device);
      trace.name_thread(process, 0, "steps");
      add_steps(trace, process, recording, device);
      const auto timeline = timeline_of(device, kTraceColumns);
      for (const auto& column : timeline.columns) {
        trace.counter(process, "memory of " + device.device,
                      us(recording.origin.unix_ns + column.time_ns), values_of(column.by_category));
      }
      trace.mark(process, "peak", us(recording.origin.unix_ns + timeline.peak_ns));
      ++process;
    }
  }
  return trace.json();
}

}  // namespace brimful::probes
