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
namespace {
constexpr double kLeft = 70;     // for the ranks' names
constexpr double kRight = 70;    // for their idle time
constexpr double kTop = 66;      // for the title and the legend
constexpr double kBottom = 34;   // for the axis
constexpr double kNextTop = 40;  // for the title of a further timeline
constexpr double kRow = 30;
constexpr double kCell = 24;  // the height of a row's cells
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

/// Control characters are not allowed in XML at all.
std::string escaped(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < ' '; }, ' ');
  return escape_markup(text);
}

/// An attribute: ` x="12.5"`.
std::string attribute(const char* name, double value) {
  return std::string(" ") + name + "=\"" + number_text(std::round(value * 100) / 100, 8) + "\"";
}

std::string rectangle(double x, double y, double width, double height, const std::string& fill) {
  return "<rect" + attribute("x", x) + attribute("y", y) + attribute("width", width) +
         attribute("height", height) + " fill=\"" + fill + "\"";
}

std::string text_at(double x, double y, const char* classes, const std::string& text) {
  return "<text" + attribute("x", x) + attribute("y", y) + " class=\"" + classes + "\">" +
         escaped(text) + "</text>\n";
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

class Svg {
 public:
  explicit Svg(const std::vector<Timeline>& timelines) {
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

  std::string document() {
    const double width = kLeft + width_ + kRight;
    const double height = panels_.back().bottom() + kBottom;
    out_ = "<svg xmlns=\"http://www.w3.org/2000/svg\"" + attribute("width", width) +
           attribute("height", height) + " viewBox=\"0 0 " + number_text(width, 8) + " " +
           number_text(height, 8) +
           "\">\n<style>text{font-family:Helvetica,Arial,sans-serif;font-size:12px;fill:#3e4c59}"
           ".title{font-size:15px;font-weight:bold;fill:#1f2933}.cell{font-size:11px;"
           "text-anchor:middle}.axis{font-size:11px;text-anchor:middle;fill:#7b8794}"
           ".end{text-anchor:end}</style>\n";
    out_ += rectangle(0, 0, width, height, "#ffffff") + "/>\n";
    for (const auto& panel : panels_) {
      const bool first = &panel == panels_.data();
      out_ += text_at(kLeft, first ? 24 : panel.top - 16, "title", title_of(*panel.timeline));
      if (first) {
        legend();
      }
      rows(panel);
      axis(panel);
      for_each_cell(*panel.timeline,
                    [&](int rank, const TimedAction& timed) { cell(panel, rank, timed); });
    }
    return out_ + "</svg>\n";
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

  void legend() {
    double x = kLeft;
    for (const auto& kind : kKindInks) {
      if (used_[static_cast<size_t>(kind.kind)]) {
        out_ += rectangle(x, 38, 12, 12, hex(kind.colour)) + " rx=\"2\"/>\n";
        out_ += text_at(x + 18, 48, "name", kind.name);
        x += 40 + kLetter * static_cast<double>(std::string_view(kind.name).size());
      }
    }
  }

  void rows(const Panel& panel) {
    out_ += text_at(kLeft + width_ + 8, panel.top - 8, "name", "idle");
    for (size_t rank = 0; rank < panel.timeline->ranks.size(); ++rank) {
      const double y = panel.top + kRow * static_cast<double>(rank);
      out_ += rectangle(kLeft, y, width_, kCell, "#eef1f4") + "/>\n";
      out_ += text_at(kLeft - 10, y + 16, "end", "rank " + std::to_string(rank));
      out_ += text_at(kLeft + width_ + 8, y + 16, "name",
                      percent_text(panel.timeline->bubble(static_cast<int>(rank))));
    }
  }

  void axis(const Panel& panel) {
    if (longest_ <= 0) {
      return;
    }
    const double step = round_step(longest_, width_ / 90);
    for (int tick = 0; tick * step <= longest_ * (1 + 1e-9); ++tick) {
      const double x = kLeft + tick * step * scale_;
      out_ += "<path d=\"M" + number_text(x) + " " + number_text(panel.top - 4) + "V" +
              number_text(panel.bottom() + 2) + "\" stroke=\"#d3dae2\"/>\n";
      out_ += text_at(x, panel.bottom() + 18, "axis", number_text(tick * step));
    }
  }

  void cell(const Panel& panel, int rank, const TimedAction& timed) {
    const auto& [action, start, end] = timed;
    const auto& stages = panel.stages[rank];
    const auto index = std::find(stages.begin(), stages.end(), action.stage) - stages.begin();
    const auto colour = shade(kKindInks[static_cast<size_t>(action.kind)].colour,
                              static_cast<int>(index), static_cast<int>(stages.size()));
    const double x = kLeft + start * scale_;
    const double y = panel.top + kRow * rank;
    const double width = (end - start) * scale_;
    out_ += rectangle(x, y, width, kCell, hex(colour)) + " stroke=\"#ffffff\"><title>" +
            to_string(action) + ": " + number_text(start) + " to " + number_text(end) +
            "</title></rect>\n";
    const auto label = std::to_string(action.microbatch);
    if (width >= kLetter * static_cast<double>(label.size()) + 3) {
      out_ += "<text" + attribute("x", x + width / 2) + attribute("y", y + 16) +
              " class=\"cell\" style=\"fill:" + ink_on(colour) + "\">" + label + "</text>\n";
    }
  }

  std::vector<Panel> panels_;
  std::array<bool, 4> used_{};  ///< by kind
  double longest_ = 0;
  double width_ = 0;
  double scale_ = 0;
  std::string out_;
};
}  // namespace

std::string to_picture_svg(const Timeline& timeline) {
  return to_picture_svg(std::vector<Timeline>{timeline});
}

std::string to_picture_svg(const std::vector<Timeline>& timelines) {
  TORCH_CHECK_VALUE(!timelines.empty(), "there is nothing to draw (timelines: 0)");
  return Svg(timelines).document();
}

}  // namespace brimful::pipeline
