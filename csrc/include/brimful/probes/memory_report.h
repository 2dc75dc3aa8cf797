#pragma once
#include <brimful/export.h>
#include <brimful/memory/recording.h>

#include <string>
#include <vector>

/// What recordings of memory (memory/recording.h) have to say: as a page, and for other tools.
namespace brimful::probes {

/// What was in use at the peak of a recording. Sites and modules are numbered as in the recording.
BRIMFUL_API memory::Peak peak_of(const memory::DeviceRecording& device);

/// One HTML page that needs no other file: memory over time by category and by line, and tables of the peak. Several
/// recordings are ranks of one run. Pure.
BRIMFUL_API std::string to_html(const std::vector<memory::Recording>& recordings);
/// The same of two runs, with what differs at their peaks.
BRIMFUL_API std::string to_html_difference(const memory::Recording& before,
                                           const memory::Recording& after);

/// Counters and steps in Chrome's trace format, which Perfetto reads. Pure.
BRIMFUL_API std::string to_chrome_trace(const std::vector<memory::Recording>& recordings);

/// As torch.cuda.memory._dump_snapshot, for pytorch.org/memory_viz and torch.cuda._memory_viz: each device is one of
/// theirs, in their order. Pure.
BRIMFUL_API std::string to_memory_viz(const std::vector<memory::Recording>& recordings);

/// Writes to_html, or the difference.
/// @throws std::system_error where the file cannot be written
BRIMFUL_API void write_report(const std::vector<memory::Recording>& recordings,
                              const std::string& path);

}  // namespace brimful::probes
