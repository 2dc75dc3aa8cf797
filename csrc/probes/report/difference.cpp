#include <brimful/probes/memory_report.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "probes/page/page.h"
#include "probes/report/parts.h"

namespace brimful::probes {
namespace {

using memory::Category;
using Json = nlohmann::ordered_json;

constexpr size_t kDifferenceRows = 60;

struct Change {
  std::string line;  ///< empty: of no line
  Category category = Category::other;
  int64_t before = 0;
  int64_t after = 0;
  int64_t more() const { return after - before; }
};

/// Keyed by what both runs have in common: the text of a line, not its number.
class Changes {
 public:
  void add(const std::string& line, Category category, int64_t bytes, bool is_after) {
    Change& change = changes_[{line, category}];
    change.line = line;
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

/// The largest of them, and how many are left out.
Json changes_json(const std::vector<Change>& changes) {
  Json rows = Json::array();
  for (size_t k = 0; k < std::min(changes.size(), kDifferenceRows); ++k) {
    const Change& change = changes[k];
    rows.push_back({{"line", change.line},
                    {"category", name_of(change.category)},
                    {"before", change.before},
                    {"after", change.after}});
  }
  const auto more = changes.size() - rows.size();
  return {{"rows", std::move(rows)}, {"more", more}};
}

void add_peak(Changes& categories, Changes& lines, const PageTimeline& page, bool is_after) {
  const auto& peak = page.timeline.peak;
  for (size_t k = 0; k < memory::kCategories; ++k) {
    categories.add("", static_cast<Category>(k), peak.by_category[k], is_after);
  }
  for (const auto& site : peak.by_site) {
    lines.add(to_string(page.recording->sites[site.site]), site.category, site.bytes, is_after);
  }
  lines.add("", Category::other, peak.before_bytes, is_after);
}

Json device_json(const std::string& device, const std::vector<PageTimeline>& pages,
                 const memory::Recording* after) {
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
  return {{"device", device},
          {"before", peaks[0]},
          {"after", peaks[1]},
          {"categories", changes_json(categories.sorted())},
          {"lines", changes_json(lines.sorted())}};
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
  auto data = page_data("difference", "Memory before and after", both, pages);
  data["devices"] = Json::array();
  for (const auto& device : devices) {
    data["devices"].push_back(device_json(device, pages, &both[1]));
  }
  return page_of(data);
}

}  // namespace brimful::probes
