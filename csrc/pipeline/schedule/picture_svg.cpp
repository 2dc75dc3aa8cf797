#include <brimful/pipeline/picture.h>
#include <brimful/pipeline/schedule_text.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/markup.h"
#include "pipeline/schedule/picture_parts.h"

namespace brimful::pipeline {

extern const char* const kSchedulePicture;  ///< picture.svg

namespace {
constexpr double kLeft = 70;     // for the ranks' names
constexpr double kRight = 70;    // for their idle time
constexpr double kTop = 66;      // for the title and the legend
constexpr double kBottom = 34;   // for the axis
constexpr double kNextTop = 40;  // for the title of a further timeline
constexpr double kRow = 30;
constexpr double kBaseline = 16;  // of a row's texts
constexpr double kLetter = 6.6;
constexpr double kTitleLetter = 8.3;
constexpr double kNarrowest = 640;
constexpr double kWidest = 3000;
constexpr double kCellWish = 22;  // a width at which two digits fit

struct Colour {
  double red, green, blue;
};
struct KindInk {
  ActionKind kind;
  const char* name;
  Colour colour;
};
constexpr std::array<KindInk, 4> kKindInks{{
    {ActionKind::forward, "forward (F)", {76, 120, 168}},
    {ActionKind::backward, "backward (B)", {217, 119, 54}},
    {ActionKind::backward_input, "backward of inputs (I)", {45, 149, 150}},
    {ActionKind::backward_weight, "backward of weights (W)", {116, 160, 66}},
}};

/// `colour` lighter for the first of a rank's stages, darker for the last.
Colour shade(const Colour& colour, int index, int count) {
  const double depth = count > 1 ? 0.38 - 0.62 * index / (count - 1) : 0;  // of white, or of black
  const auto mix = [&](double value) {
    return depth > 0 ? value + (255 - value) * depth : value * (1 + depth);
  };
  return {mix(colour.red), mix(colour.green), mix(colour.blue)};
}

std::string hex(const Colour& colour) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string text = "#";
  for (const double part : {colour.red, colour.green, colour.blue}) {
    const auto value = static_cast<size_t>(std::lround(part));
    text += digits[value / 16];
    text += digits[value % 16];
  }
  return text;
}

/// White or nearly black, whichever is read better on it.
const char* ink_on(const Colour& colour) {
  return 0.299 * colour.red + 0.587 * colour.green + 0.114 * colour.blue < 158 ? "#ffffff"
                                                                               : "#1f2933";
}

/// A place or length in the picture.
std::string place(double value) {
  return number_text(std::round(value * 100) / 100, 8);
}

/// 1, 2 or 5 times a power of ten, such that about `count` of them make `length`.
double round_step(double length, double count) {
  const double raw = length / std::max(count, 1.0);
  const double power = std::pow(10, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= raw) {
      return factor * power;
    }
  }
  return 10 * power;
}

/// A timeline's rows in the picture.
struct Panel {
  const Timeline* timeline = nullptr;
  double top = 0;                          ///< of its first row
  std::vector<std::vector<int>> stages{};  ///< by rank
  double bottom() const { return top + kRow * static_cast<double>(timeline->ranks.size()); }
};

class Picture {
 public:
  explicit Picture(const std::vector<Timeline>& timelines) {
    double shortest = std::numeric_limits<double>::max();
    double title = 0;
    double top = kTop;
    for (const auto& timeline : timelines) {
      panels_.push_back({&timeline, top});
      shortest = std::min(shortest, look_at(panels_.back()));
      longest_ = std::max(longest_, timeline.makespan);
      title = std::max(title, kTitleLetter * static_cast<double>(title_of(timeline).size()));
      top = panels_.back().bottom() + kBottom + kNextTop;
    }
    const double length = longest_ > 0 ? longest_ : 1;
    width_ = std::clamp(std::max(length * kCellWish / shortest, title), kNarrowest, kWidest);
    scale_ = width_ / length;
  }

  Fields fields() const {
    Fields all{{{"width", place(kLeft + width_ + kRight)},
                {"height", place(panels_.back().bottom() + kBottom)}}};
    for (const auto& panel : panels_) {
      all.lists["panels"].push_back(fields_of(panel));
    }
    return all;
  }

 private:
  /// Finds the ranks' stages and the kinds of actions; returns the shortest action's time.
  double look_at(Panel& panel) {
    double shortest = std::numeric_limits<double>::max();
    panel.stages.resize(panel.timeline->ranks.size());
    for_each_cell(*panel.timeline, [&](int rank, const TimedAction& timed) {
      shortest = std::min(shortest, timed.end - timed.start);
      auto& stages = panel.stages[rank];
      if (std::find(stages.begin(), stages.end(), timed.action.stage) == stages.end()) {
        stages.push_back(timed.action.stage);
      }
      used_[static_cast<size_t>(timed.action.kind)] = true;
    });
    for (auto& stages : panel.stages) {
      std::sort(stages.begin(), stages.end());
    }
    return shortest;
  }

  Fields fields_of(const Panel& panel) const {
    const bool first = &panel == panels_.data();
    Fields all{{{"left", place(kLeft)},
                {"top", place(panel.top)},
                {"title", title_of(*panel.timeline)},
                {"title_y", first ? "-42" : "-16"},
                {"idle_x", place(width_ + 8)}},
               {{"legend", first ? legend() : std::vector<Fields>{}},
                {"ranks", ranks(panel)},
                {"ticks", ticks(panel)},
                {"cells", {}}}};
    for_each_cell(*panel.timeline, [&](int rank, const TimedAction& timed) {
      all.lists["cells"].push_back(cell(panel, rank, timed));
    });
    return all;
  }

  std::vector<Fields> legend() const {
    std::vector<Fields> entries;
    double x = 0;
    for (const auto& kind : kKindInks) {
      if (used_[static_cast<size_t>(kind.kind)]) {
        entries.push_back({{{"x", place(x)},
                            {"name_x", place(x + 18)},
                            {"name", kind.name},
                            {"colour", hex(kind.colour)}}});
        x += 40 + kLetter * static_cast<double>(std::string_view(kind.name).size());
      }
    }
    return entries;
  }

  std::vector<Fields> ranks(const Panel& panel) const {
    std::vector<Fields> rows;
    for (size_t rank = 0; rank < panel.timeline->ranks.size(); ++rank) {
      const double y = kRow * static_cast<double>(rank);
      rows.push_back({{{"y", place(y)},
                       {"text_y", place(y + kBaseline)},
                       {"width", place(width_)},
                       {"idle_x", place(width_ + 8)},
                       {"rank", std::to_string(rank)},
                       {"idle", percent_text(panel.timeline->bubble(static_cast<int>(rank)))}}});
    }
    return rows;
  }

  std::vector<Fields> ticks(const Panel& panel) const {
    std::vector<Fields> marks;
    const double step = longest_ > 0 ? round_step(longest_, width_ / 90) : 0;
    const double height = panel.bottom() - panel.top;
    for (int tick = 0; step > 0 && tick * step <= longest_ * (1 + 1e-9); ++tick) {
      marks.push_back({{{"x", place(tick * step * scale_)},
                        {"end", place(height + 2)},
                        {"text_y", place(height + 18)},
                        {"time", number_text(tick * step)}}});
    }
    return marks;
  }

  Fields cell(const Panel& panel, int rank, const TimedAction& timed) const {
    const auto& [action, start, end] = timed;
    const auto& stages = panel.stages[rank];
    const auto index = std::find(stages.begin(), stages.end(), action.stage) - stages.begin();
    const auto colour = shade(kKindInks[static_cast<size_t>(action.kind)].colour,
                              static_cast<int>(index), static_cast<int>(stages.size()));
    const double x = start * scale_;
    const double y = kRow * rank;
    const double width = (end - start) * scale_;
    Fields all{{{"x", place(x)},
                {"y", place(y)},
                {"width", place(width)},
                {"colour", hex(colour)},
                {"action", to_string(action)},
                {"start", number_text(start)},
                {"end", number_text(end)}},
               {{"label", {}}}};
    const auto label = std::to_string(action.microbatch);
    if (width >= kLetter * static_cast<double>(label.size()) + 3) {
      all.lists["label"].push_back({{{"x", place(x + width / 2)},
                                     {"text_y", place(y + kBaseline)},
                                     {"ink", ink_on(colour)},
                                     {"text", label}}});
    }
    return all;
  }

  std::vector<Panel> panels_;
  std::array<bool, 4> used_{};  ///< by kind
  double longest_ = 0;
  double width_ = 0;
  double scale_ = 0;
};
}  // namespace

std::string to_picture_svg(const Timeline& timeline) {
  return to_picture_svg(std::vector<Timeline>{timeline});
}

std::string to_picture_svg(const std::vector<Timeline>& timelines) {
  TORCH_CHECK_VALUE(!timelines.empty(), "there is nothing to draw (timelines: 0)");
  return fill_markup(kSchedulePicture, Picture(timelines).fields());
}

}  // namespace brimful::pipeline
