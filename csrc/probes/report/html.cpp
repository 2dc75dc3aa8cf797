#include <brimful/probes/memory_report.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "base/format.h"
#include "base/whole_file.h"
#include "memory/most_bytes_first.h"
#include "probes/report/parts.h"

namespace brimful::probes {
namespace {

using memory::Category;
using memory::Recording;

constexpr size_t kSiteRows = 40;

std::string plural(int64_t count, const std::string& word) {
  return format_count(count) + " " + word + (count == 1 ? "" : "s");
}

std::string moment_text(const Timeline& timeline) {
  return "step " + std::to_string(timeline.peak.step) + ", " + name_of(timeline.peak.phase) + ", " +
         time_text(timeline.peak_ns);
}

int64_t steps_of(const memory::DeviceRecording& device) {
  return std::count_if(device.events.begin(), device.events.end(),
                       [](const auto& event) { return event.kind == memory::EventKind::step; });
}

void write_facts(std::ostream& out, const PageTimeline& page) {
  const auto& device = *page.device;
  const int64_t steps = steps_of(device);
  out << "<p>Peak <b>" << format_bytes(page.timeline.peak.bytes) << "</b> ("
      << moment_text(page.timeline) << " after the beginning). "
      << plural(static_cast<int64_t>(device.events.size()) - steps, "event") << ", "
      << plural(steps, "step") << ", " << time_text(page.recording->duration_ns) << ".</p>\n";
  if (device.lost_events > 0) {
    out << "<p class=note>" << plural(device.lost_events, "older event")
        << " made room for newer ones: the page begins behind them, with what was in use then. "
           "<code>record(ring_bytes=...)</code> keeps more.</p>\n";
  }
  if (device.peak_bytes > page.timeline.peak.bytes) {
    out << "<p class=note>More was in use before the first event here: "
        << format_bytes(device.peak_bytes) << ".</p>\n";
  }
  if (device.events.empty()) {
    out << "<p class=note>Nothing was allocated or freed while this was recorded.</p>\n";
  }
}

void write_categories(std::ostream& out, const memory::Peak& peak) {
  const auto bytes_of = [&](Category category) {
    return peak.by_category[static_cast<size_t>(category)];
  };
  out << "<h3>At the peak, by category</h3>\n<table class=categories>\n";
  for (const Category category : memory::most_bytes_first(peak.by_category)) {
    out << "<tr><td class=n>" << format_bytes(bytes_of(category)) << "</td>";
    write_bar(out, category, bytes_of(category), peak.bytes);
    out << "<td>" << category_html(category) << "</td></tr>\n";
  }
  out << "</table>\n";
}

void write_sites(std::ostream& out, const PageTimeline& page) {
  const auto& peak = page.timeline.peak;
  out << "<h3>At the peak, by line</h3>\n<table class=lines>\n"
         "<tr><th class=n>in use</th><th></th><th>category</th><th class=n>blocks</th>"
         "<th>line</th></tr>\n";
  int64_t rest_bytes = 0;
  for (size_t k = 0; k < peak.by_site.size(); ++k) {
    const auto& site = peak.by_site[k];
    if (k >= kSiteRows) {
      rest_bytes += site.bytes;
      continue;
    }
    out << "<tr><td class=n>" << format_bytes(site.bytes) << "</td>";
    write_bar(out, site.category, site.bytes, peak.bytes);
    out << "<td>" << category_html(site.category) << "</td><td class=n>" << site.blocks
        << "</td><td>" << place_html(*page.recording, site.site);
    if (site.module != 0) {
      out << " in " << place_html(*page.recording, site.module);
    }
    out << "</td></tr>\n";
  }
  const auto write_rest = [&](int64_t bytes, const std::string& what) {
    if (bytes != 0) {
      out << "<tr><td class=n>" << format_bytes(bytes) << "</td>";
      write_bar(out, Category::other, bytes, peak.bytes);
      out << "<td colspan=3>" << what << "</td></tr>\n";
    }
  };
  write_rest(rest_bytes, plural(static_cast<int64_t>(peak.by_site.size() -
                                                     std::min(peak.by_site.size(), kSiteRows)),
                                "more line"));
  write_rest(peak.before_bytes, "from before tracking began: no line is known");
  out << "</table>\n";
}

/// Of all ranks: the chart of their totals, and their peaks.
void write_ranks(std::ostream& out, const std::vector<PageTimeline>& pages) {
  std::vector<const PageTimeline*> sorted;
  for (const auto& page : pages) {
    sorted.push_back(&page);
  }
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto* a, const auto* b) {
    return a->timeline.peak.bytes > b->timeline.peak.bytes;
  });
  const int64_t most = sorted.front()->timeline.peak.bytes;
  out << "<div class=chart data-totals></div>\n<table class=ranks>\n"
         "<tr><th class=n>peak</th><th></th><th>of</th><th>when</th><th>mostly</th></tr>\n";
  for (const auto* page : sorted) {
    const auto& peak = page->timeline.peak;
    const auto largest =
        static_cast<Category>(std::max_element(peak.by_category.begin(), peak.by_category.end()) -
                              peak.by_category.begin());
    out << "<tr><td class=n>" << format_bytes(peak.bytes) << "</td>";
    write_bar(out, largest, peak.bytes, most);
    out << "<td>" << page->name << "</td><td>" << moment_text(page->timeline) << "</td><td>"
        << category_html(largest) << "</td></tr>\n";
  }
  out << "</table>\n";
}

}  // namespace

memory::Peak peak_of(const memory::DeviceRecording& device) {
  return timeline_of(device, 1).peak;
}

std::string to_html(const std::vector<Recording>& recordings) {
  const auto pages = timelines_of(recordings);
  std::ostringstream body;
  write_sources(body, recordings);
  if (pages.empty()) {
    body << "<p class=note>There is no device in this recording.</p>\n";
  } else if (pages.size() > 1) {
    write_ranks(body, pages);
  }
  const auto highest =
      static_cast<size_t>(std::max_element(pages.begin(), pages.end(),
                                           [](const auto& a, const auto& b) {
                                             return a.timeline.peak.bytes < b.timeline.peak.bytes;
                                           }) -
                          pages.begin());
  for (size_t k = 0; k < pages.size(); ++k) {
    if (pages.size() > 1) {
      body << "<details" << (k == highest ? " open" : "") << "><summary>" << pages[k].name
           << "</summary>\n";
    }
    write_facts(body, pages[k]);
    body << "<div class=chart data-timeline=" << k << "></div>\n";
    write_categories(body, pages[k].timeline.peak);
    write_sites(body, pages[k]);
    body << (pages.size() > 1 ? "</details>\n" : "");
  }
  std::ostringstream page;
  write_page(page, pages.size() == 1 ? "Memory of " + pages[0].name : "Memory", body.str(), pages);
  return page.str();
}

void write_report(const std::vector<Recording>& recordings, const std::string& path) {
  write_file(path, to_html(recordings));
}

}  // namespace brimful::probes
