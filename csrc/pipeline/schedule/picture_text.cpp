#include <brimful/pipeline/picture.h>
#include <brimful/pipeline/schedule_text.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "pipeline/schedule/picture_parts.h"

namespace brimful::pipeline {
namespace {
constexpr double kMostColumns = 4000;

/// "F0", or "3F0" where a rank has several stages.
std::string label_of(const Timeline& timeline, const Action& action) {
  const auto text = to_string(action);
  const bool has_several = timeline.stages > static_cast<int>(timeline.ranks.size());
  return has_several ? text : text.substr(std::to_string(action.stage).size());
}

/// Columns a unit of time so that every label fits, as far as `columns` allows.
double scale_of(const Timeline& timeline, int columns) {
  double scale = 0;
  for_each_cell(timeline, [&](int, const TimedAction& timed) {
    const auto width = static_cast<double>(label_of(timeline, timed.action).size() + 1);
    scale = std::max(scale, width / (timed.end - timed.start));
  });
  const double most = columns > 0 ? columns : kMostColumns;
  return timeline.makespan > 0 ? std::min(scale, most / timeline.makespan) : 0;
}

/// A cell of `width` characters, the last one blank where the label leaves room for it.
std::string cell_text(const std::string& label, char kind, size_t width) {
  std::string text = label.size() <= width ? label : std::string(1, kind);
  text.resize(width, '-');
  if (label.size() != width && width > 1) {
    text.back() = ' ';
  }
  return text;
}
}  // namespace

std::string number_text(double value, int digits) {
  std::array<char, 64> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value,
                                 std::chars_format::general, digits);
  return {buffer.data(), end.ptr};
}

std::string percent_text(double share) {
  std::array<char, 64> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(),
                                 std::max(share, 0.0) * 100, std::chars_format::fixed, 1);
  return std::string(buffer.data(), end.ptr) + " %";
}

std::string title_of(const Timeline& timeline) {
  const auto count = [](size_t number, const std::string& what, const char* plural) {
    return std::to_string(number) + " " + what + (number == 1 ? "" : plural);
  };
  const bool overlaps = timeline.period < timeline.makespan * (1 - 1e-9);
  const auto period = overlaps ? ", period " + number_text(timeline.period) : "";
  return timeline.name + ": " + count(timeline.ranks.size(), "rank", "s") + ", " +
         count(timeline.stages, "stage", "s") + ", " +
         count(timeline.microbatches, "microbatch", "es") + "; time " +
         number_text(timeline.makespan) + period + ", bubble " + percent_text(timeline.bubble());
}

std::string to_picture_text(const Timeline& timeline, int columns) {
  TORCH_CHECK_VALUE(columns >= 0, "a picture has no negative width (columns: ", columns,
                    "); 0 is as wide as it needs");
  const double scale = scale_of(timeline, columns);
  const auto column = [&](double time) { return static_cast<size_t>(std::lround(time * scale)); };
  std::vector<std::string> rows(timeline.ranks.size(), std::string(column(timeline.makespan), '.'));
  for_each_cell(timeline, [&](int rank, const TimedAction& timed) {
    const auto begin = column(timed.start);
    const auto width = column(timed.end) - begin;
    const auto label = label_of(timeline, timed.action);
    const char kind = *std::find_if(label.begin(), label.end(), [](char c) { return c > '9'; });
    rows[rank].replace(begin, width, cell_text(label, kind, width));
  });
  std::string text = title_of(timeline) + "\n";
  const auto last = std::to_string(rows.empty() ? 0 : rows.size() - 1).size();
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    const auto number = std::to_string(rank);
    text += "rank " + std::string(last - number.size(), ' ') + number + " |" + rows[rank] + "| " +
            percent_text(timeline.bubble(static_cast<int>(rank))) + "\n";
  }
  return text;
}

}  // namespace brimful::pipeline
