#pragma once
#include <brimful/memory/recording.h>

#include <ostream>
#include <string>
#include <vector>

#include "probes/report/timeline.h"

/// Parts of the pages of memory_report.h.
namespace brimful::probes {

/// page.css and page.js.
extern const char* const kReportStyle;
extern const char* const kReportScript;

struct PageTimeline {
  std::string name;  ///< "rank 0, cpu"
  const memory::Recording* recording = nullptr;
  const memory::DeviceRecording* device = nullptr;
  Timeline timeline;
};

/// For each device of each recording; fewer columns where there are many.
std::vector<PageTimeline> timelines_of(const std::vector<memory::Recording>& recordings);

/// The charts' data, as JSON that may stand within a <script>.
std::string to_json(const std::vector<PageTimeline>& timelines);

/// A line of code as HTML.
std::string place_html(const memory::Recording& recording, uint32_t site);
std::string category_html(memory::Category category);
/// A cell with a bar, as long as `bytes` are of `most`.
void write_bar(std::ostream& out, memory::Category category, int64_t bytes, int64_t most);
std::string time_text(int64_t ns);

/// The recordings' files, and where, when and of what they were made.
void write_sources(std::ostream& out, const std::vector<memory::Recording>& recordings);
void write_page(std::ostream& out, const std::string& title, const std::string& body,
                const std::vector<PageTimeline>& timelines);

}  // namespace brimful::probes
