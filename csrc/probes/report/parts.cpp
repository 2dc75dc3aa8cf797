#include "probes/report/parts.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "base/one_line.h"
#include "probes/page/page.h"

namespace brimful::probes {
namespace {

using memory::Category;
using Json = nlohmann::ordered_json;

// A few for each pixel of a screen, to have some to zoom into; many timelines share four times as many.
constexpr size_t kChartColumns = 8192;
constexpr size_t kAllColumns = 4 * kChartColumns;
constexpr size_t kLeastColumns = 1024;
constexpr size_t kSiteRows = 40;

/// Of the stacked areas, the lowest first: what changes least lies below.
constexpr std::array kStack{
    Category::other,           Category::parameters, Category::buffers,
    Category::optimizer_state, Category::gradients,  Category::activations,
    Category::temporaries,     Category::workspace,  Category::communication};
static_assert(kStack.size() == memory::kCategories);

/// Each number less the one before it: short, and exact.
template <typename Number>
Json differences(const std::vector<TimelineColumn>& columns, const Number& number) {
  Json list = Json::array();
  int64_t before = 0;
  for (const TimelineColumn& column : columns) {
    const int64_t value = number(column);
    list.push_back(value - before);
    before = value;
  }
  return list;
}

Json series(const std::string& name, const std::string& style, Json values) {
  return {{"name", name}, {"style", style}, {"values", std::move(values)}};
}

Json by_category(const Timeline& timeline) {
  Json list = Json::array();
  for (const Category category : kStack) {
    const auto bytes_of = [category](const TimelineColumn& column) {
      return column.by_category[static_cast<size_t>(category)];
    };
    if (std::any_of(timeline.columns.begin(), timeline.columns.end(),
                    [&](const auto& column) { return bytes_of(column) != 0; })) {
      list.push_back(
          series(name_of(category), name_of(category), differences(timeline.columns, bytes_of)));
    }
  }
  return list;
}

Json by_site(const PageTimeline& page) {
  const auto& columns = page.timeline.columns;
  const auto rest = [](const TimelineColumn& column) {
    int64_t bytes = column.used_bytes();
    for (const int64_t of_site : column.by_site) {
      bytes -= of_site;
    }
    return bytes;
  };
  Json list = Json::array({series("all else", "rest", differences(columns, rest))});
  for (size_t k = 0; k < page.timeline.sites.size(); ++k) {
    const auto bytes_of = [k](const auto& column) { return column.by_site[k]; };
    list.push_back(series(to_string(page.recording->sites[page.timeline.sites[k]]),
                          "line" + std::to_string(k), differences(columns, bytes_of)));
  }
  return list;
}

Json peak_json(const PageTimeline& page) {
  const auto& peak = page.timeline.peak;
  Json lines = Json::array();
  int64_t more_bytes = 0;
  for (size_t k = 0; k < peak.by_site.size(); ++k) {
    const auto& site = peak.by_site[k];
    if (k >= kSiteRows) {
      more_bytes += site.bytes;
      continue;
    }
    const auto place = [&](uint32_t number) { return to_string(page.recording->sites[number]); };
    lines.push_back({{"line", place(site.site)},
                     {"module", site.module == 0 ? "" : place(site.module)},
                     {"category", name_of(site.category)},
                     {"bytes", site.bytes},
                     {"blocks", site.blocks}});
  }
  return {{"bytes", peak.bytes},
          {"time_us", page.timeline.peak_ns / 1000},
          {"step", peak.step},
          {"phase", name_of(peak.phase)},
          {"categories", categories_json(peak.by_category)},
          {"lines", std::move(lines)},
          {"more_lines", peak.by_site.size() - std::min(peak.by_site.size(), kSiteRows)},
          {"more_bytes", more_bytes},
          {"before_bytes", peak.before_bytes}};
}

Json json_of(const PageTimeline& page, int64_t first_unix_ns) {
  const auto& [name, recording, device, timeline] = page;
  const auto& columns = timeline.columns;
  const auto steps =
      std::count_if(device->events.begin(), device->events.end(),
                    [](const auto& event) { return event.kind == memory::EventKind::step; });
  return {
      {"name", name},
      {"device", device->device},
      {"offset_us", (recording->origin.unix_ns - first_unix_ns) / 1000},
      {"end_us", recording->duration_ns / 1000},
      {"events", static_cast<int64_t>(device->events.size()) - steps},
      {"steps", steps},
      {"lost_events", device->lost_events},
      {"most_bytes", device->peak_bytes},
      {"peak", peak_json(page)},
      {"time_us", differences(columns, [](const auto& column) { return column.time_ns / 1000; })},
      {"step", differences(columns, [](const auto& column) { return column.step; })},
      {"phase",
       differences(columns, [](const auto& column) { return static_cast<int64_t>(column.phase); })},
      {"category", by_category(timeline)},
      {"line", by_site(page)}};
}

}  // namespace

std::vector<PageTimeline> timelines_of(const std::vector<memory::Recording>& recordings) {
  size_t count = 0;
  for (const auto& recording : recordings) {
    count += recording.devices.size();
  }
  const size_t columns =
      std::clamp(kAllColumns / std::max<size_t>(count, 1), kLeastColumns, kChartColumns);
  std::vector<PageTimeline> pages;
  for (const auto& recording : recordings) {
    for (const auto& device : recording.devices) {
      const bool has_rank = recording.ranks > 1 || recordings.size() > 1;
      const auto rank = has_rank ? "rank " + std::to_string(recording.rank) + ", " : "";
      pages.push_back({rank + device.device, &recording, &device, timeline_of(device, columns)});
    }
  }
  return pages;
}

Json page_data(const char* kind, const std::string& title,
               const std::vector<memory::Recording>& recordings,
               const std::vector<PageTimeline>& timelines) {
  int64_t first_unix_ns = INT64_MAX;
  Json sources = Json::array();
  for (const auto& recording : recordings) {
    first_unix_ns = std::min(first_unix_ns, recording.origin.unix_ns);
    sources.push_back(
        {{"file", one_line(recording.path)}, {"origin", to_string(recording.origin)}});
  }
  Json list = Json::array();
  for (const auto& page : timelines) {
    list.push_back(json_of(page, first_unix_ns));
  }
  return {{"kind", kind},
          {"title", title},
          {"sources", std::move(sources)},
          {"timelines", std::move(list)}};
}

}  // namespace brimful::probes
