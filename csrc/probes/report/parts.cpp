#include "probes/report/parts.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "base/markup.h"
#include "base/one_line.h"

namespace brimful::probes {
namespace {

using memory::Category;
using Json = nlohmann::ordered_json;

// A few for each pixel of a screen, to have some to zoom into; many timelines share four times as many.
constexpr size_t kChartColumns = 8192;
constexpr size_t kAllColumns = 4 * kChartColumns;
constexpr size_t kLeastColumns = 1024;
constexpr size_t kSourcesShown = 2;  // more are folded

/// From below; what changes least comes first.
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

Json json_of(const PageTimeline& page, int64_t first_unix_ns) {
  const auto& [name, recording, device, timeline] = page;
  const auto& columns = timeline.columns;
  return {
      {"name", name},
      {"offset_us", (recording->origin.unix_ns - first_unix_ns) / 1000},
      {"end_us", recording->duration_ns / 1000},
      {"peak", {{"bytes", timeline.peak.bytes}, {"time_us", timeline.peak_ns / 1000}}},
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

std::string to_json(const std::vector<PageTimeline>& timelines) {
  int64_t first_unix_ns = INT64_MAX;
  for (const auto& page : timelines) {
    first_unix_ns = std::min(first_unix_ns, page.recording->origin.unix_ns);
  }
  Json list = Json::array();
  for (const auto& page : timelines) {
    list.push_back(json_of(page, first_unix_ns));
  }
  std::string safe;
  for (const char c : json_text(list)) {
    if (c == '<') {
      safe += "\\u003c";  // a name may be "</script>"
    } else {
      safe += c;
    }
  }
  return safe;
}

std::string place_html(const memory::Recording& recording, uint32_t site) {
  return "<code>" + escape_markup(valid_utf8(to_string(recording.sites[site]))) + "</code>";
}

std::string category_html(Category category) {
  const std::string name = name_of(category);
  return "<span class=\"key " + name + "\">" + name + "</span>";
}

void write_bar(std::ostream& out, Category category, int64_t bytes, int64_t most) {
  const auto share = most > 0 ? static_cast<double>(bytes) / static_cast<double>(most) : 0.0;
  std::array<char, 16> percent{};
  std::snprintf(percent.data(), percent.size(), "%.1f", 100 * std::clamp(share, 0.0, 1.0));
  out << "<td class=bar><i class=" << name_of(category) << " style=\"width:" << percent.data()
      << "%\"></i></td>";
}

std::string time_text(int64_t ns) {
  std::array<char, 32> text{};
  const bool is_short = ns < 1'000'000'000;
  std::snprintf(text.data(), text.size(), is_short ? "%.2f ms" : "%.2f s",
                static_cast<double>(ns) / (is_short ? 1e6 : 1e9));
  return text.data();
}

void write_sources(std::ostream& out, const std::vector<memory::Recording>& recordings) {
  std::vector<std::string> lines;
  for (const auto& recording : recordings) {
    const auto file = recording.path.empty()
                          ? ""
                          : "<code>" + escape_markup(one_line(recording.path)) + "</code>: ";
    lines.push_back("<p class=note>" + file + escape_markup(to_string(recording.origin)) +
                    "</p>\n");
  }
  const bool folded = lines.size() > kSourcesShown;
  out << (folded ? "<details><summary>" + std::to_string(lines.size()) + " recordings</summary>\n"
                 : "");
  for (const auto& line : lines) {
    out << line;
  }
  out << (folded ? "</details>\n" : "");
}

void write_page(std::ostream& out, const std::string& title, const std::string& body,
                const std::vector<PageTimeline>& timelines) {
  out << "<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8>"
         "<meta name=viewport content=\"width=device-width\"><title>"
      << escape_markup(title) << "</title>\n<style>\n"
      << kReportStyle << "</style></head><body>\n<h1>" << escape_markup(title) << "</h1>\n"
      << body << "<script type=\"application/json\" id=data>" << to_json(timelines)
      << "</script>\n<script>\n"
      << kReportScript << "</script></body></html>\n";
}

}  // namespace brimful::probes
