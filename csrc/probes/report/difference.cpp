#include <brimful/probes/memory_report.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <sstream>

#include "base/format.h"
#include "probes/report/parts.h"

namespace brimful::probes {
namespace {

using memory::Category;

constexpr size_t kDifferenceRows = 60;

struct Change {
  std::string what;  // HTML
  Category category = Category::other;
  int64_t before = 0;
  int64_t after = 0;
  int64_t more() const { return after - before; }
};

/// Keyed by what both runs have in common: the words of a line, not its number.
class Changes {
 public:
  void add(const std::string& key, const std::string& what, Category category, int64_t bytes,
           bool is_after) {
    Change& change = changes_[{key, category}];
    change.what = what;
    change.category = category;
    (is_after ? change.after : change.before) += bytes;
  }
  /// The largest difference first; what is equal is left out.
  std::vector<Change> sorted() const {
    std::vector<Change> list;
    for (const auto& [key, change] : changes_) {
      if (change.more() != 0) {
        list.push_back(change);
      }
    }
    std::stable_sort(list.begin(), list.end(), [](const Change& a, const Change& b) {
      return std::abs(a.more()) > std::abs(b.more());
    });
    return list;
  }

 private:
  std::map<std::pair<std::string, Category>, Change> changes_;
};

std::string signed_bytes(int64_t bytes) {
  return (bytes > 0 ? "+" : "") + format_bytes(bytes);
}

void write_changes(std::ostream& out, const char* title, const std::vector<Change>& changes) {
  out << "<h3>" << title << "</h3>\n";
  if (changes.empty()) {
    out << "<p>No difference.</p>\n";
    return;
  }
  const int64_t most = std::abs(changes.front().more());
  out << "<table class=changes>\n<tr><th class=n>difference</th><th></th><th class=n>before</th>"
         "<th class=n>after</th><th>category</th><th></th></tr>\n";
  for (size_t k = 0; k < std::min(changes.size(), kDifferenceRows); ++k) {
    const Change& change = changes[k];
    out << "<tr><td class=\"n " << (change.more() > 0 ? "more" : "less") << "\">"
        << signed_bytes(change.more()) << "</td>";
    write_bar(out, change.category, std::abs(change.more()), most);
    out << "<td class=n>" << format_bytes(change.before) << "</td><td class=n>"
        << format_bytes(change.after) << "</td><td>" << category_html(change.category)
        << "</td><td>" << change.what << "</td></tr>\n";
  }
  out << "</table>\n";
  if (changes.size() > kDifferenceRows) {
    out << "<p>And " << changes.size() - kDifferenceRows << " smaller ones.</p>\n";
  }
}

void add_peak(Changes& categories, Changes& lines, const PageTimeline& page, bool is_after) {
  const auto& peak = page.timeline.peak;
  for (size_t k = 0; k < memory::kCategories; ++k) {
    categories.add("", "", static_cast<Category>(k), peak.by_category[k], is_after);
  }
  for (const auto& site : peak.by_site) {
    lines.add(to_string(page.recording->sites[site.site]), place_html(*page.recording, site.site),
              site.category, site.bytes, is_after);
  }
  lines.add("", "from before tracking began", Category::other, peak.before_bytes, is_after);
}

void write_device(std::ostream& out, const std::string& device,
                  const std::vector<PageTimeline>& pages, const memory::Recording* after) {
  Changes categories;
  Changes lines;
  int64_t peaks[2] = {0, 0};
  for (const auto& page : pages) {
    if (page.device->device == device) {
      const bool is_after = page.recording == after;
      add_peak(categories, lines, page, is_after);
      peaks[is_after ? 1 : 0] = page.timeline.peak.bytes;
    }
  }
  out << "<h2>" << device << "</h2>\n<p>Peak <b>" << format_bytes(peaks[0]) << "</b> before, <b>"
      << format_bytes(peaks[1]) << "</b> after: <b>" << signed_bytes(peaks[1] - peaks[0])
      << "</b>.</p>\n";
  write_changes(out, "At the peaks, by category", categories.sorted());
  write_changes(out, "At the peaks, by line", lines.sorted());
  for (size_t k = 0; k < pages.size(); ++k) {
    if (pages[k].device->device == device) {
      out << "<h3>" << pages[k].name << "</h3>\n<div class=chart data-timeline=" << k
          << " data-scale=" << std::max(peaks[0], peaks[1]) << "></div>\n";
    }
  }
}

}  // namespace

std::string to_html_difference(const memory::Recording& before, const memory::Recording& after) {
  const std::vector both{before, after};
  auto pages = timelines_of(both);
  std::set<std::string> devices;
  for (auto& page : pages) {
    devices.insert(page.device->device);
    page.name = page.recording == &both[0] ? "before" : "after";
  }
  std::ostringstream body;
  write_sources(body, both);
  for (const auto& device : devices) {
    write_device(body, device, pages, &both[1]);
  }
  std::ostringstream page;
  write_page(page, "Memory before and after", body.str(), pages);
  return page.str();
}

}  // namespace brimful::probes
