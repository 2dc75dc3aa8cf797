#include "probes/report/parts.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "base/json.h"
#include "base/markup.h"
#include "base/one_line.h"

namespace brimful::probes {
namespace {

using memory::Category;

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
std::string differences(const std::vector<TimelineColumn>& columns, const Number& number) {
  std::string text = "[";
  int64_t before = 0;
  for (const TimelineColumn& column : columns) {
    const int64_t value = number(column);
    text += (text.size() > 1 ? "," : "") + std::to_string(value - before);
    before = value;
  }
  return text + "]";
}

std::string series(const std::string& name, const std::string& style, const std::string& values) {
  return "{\"name\":" + json_string(name) + ",\"style\":\"" + style + "\",\"values\":" + values +
         "}";
}

std::string by_category(const Timeline& timeline) {
  std::string text;
  for (const Category category : kStack) {
    const auto bytes_of = [category](const TimelineColumn& column) {
      return column.by_category[static_cast<size_t>(category)];
    };
    if (std::any_of(timeline.columns.begin(), timeline.columns.end(),
                    [&](const auto& column) { return bytes_of(column) != 0; })) {
      text += (text.empty() ? "" : ",") +
              series(name_of(category), name_of(category), differences(timeline.columns, bytes_of));
    }
  }
  return "[" + text + "]";
}

std::string by_site(const PageTimeline& page) {
  const auto& columns = page.timeline.columns;
  const auto rest = [](const TimelineColumn& column) {
    int64_t bytes = column.used_bytes();
    for (const int64_t of_site : column.by_site) {
      bytes -= of_site;
    }
    return bytes;
  };
  std::string text = series("all else", "rest", differences(columns, rest));
  for (size_t k = 0; k < page.timeline.sites.size(); ++k) {
    const auto place = to_string(page.recording->sites[page.timeline.sites[k]]);
    text +=
        "," + series(place, "line" + std::to_string(k),
                     differences(columns, [k](const auto& column) { return column.by_site[k]; }));
  }
  return "[" + text + "]";
}

std::string to_json(const PageTimeline& page, int64_t first_unix_ns) {
  const auto& [name, recording, device, timeline] = page;
  const auto us = [](int64_t ns) { return std::to_string(ns / 1000); };
  std::string text = "{\"name\":" + json_string(name);
  text += ",\"offset_us\":" + us(recording->origin.unix_ns - first_unix_ns);
  text += ",\"end_us\":" + us(recording->duration_ns);
  text += ",\"peak\":{\"bytes\":" + std::to_string(timeline.peak.bytes) +
          ",\"time_us\":" + us(timeline.peak_ns) + "}";
  text += ",\"time_us\":" +
          differences(timeline.columns, [](const auto& column) { return column.time_ns / 1000; });
  text += ",\"step\":" + differences(timeline.columns, [](const auto& c) { return c.step; });
  text += ",\"phase\":" + differences(timeline.columns, [](const auto& column) {
            return static_cast<int64_t>(column.phase);
          });
  text += ",\"category\":" + by_category(timeline) + ",\"line\":" + by_site(page);
  return text + "}";
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
  std::string text = "[";
  for (const auto& page : timelines) {
    text += (text.size() > 1 ? ",\n" : "") + to_json(page, first_unix_ns);
  }
  std::string safe;
  for (const char c : text + "]") {
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
