#include "support/catch.h"

#include <brimful/pipeline/picture.h>
#include <brimful/pipeline/schedules.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>

namespace test_picture {

using namespace brimful::pipeline;
using Catch::Contains;

namespace {
int count_of(const std::string& text, const std::string& part) {
  int count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(line);
  }
  return lines;
}
}  // namespace

TEST_CASE("A picture as text shows who does what when", "[pipeline]") {
  CHECK("\n" + to_picture_text(simulate(one_forward_one_backward(3, 4))) == R"(
1f1b: 3 ranks, 3 stages, 4 microbatches; time 18, bubble 33.3 %
rank 0 |F0 F1 F2 ............B0--- F3 B1--- ...B2--- ...B3--- | 33.3 %
rank 1 |...F0 F1 ......B0--- F2 B1--- F3 B2--- ...B3--- ......| 33.3 %
rank 2 |......F0 B0--- F1 B1--- F2 B2--- F3 B3--- ............| 33.3 %
)");
  CHECK("\n" + to_picture_text(simulate(zb_h2(2, 4))) == R"(
zb_h2: 2 ranks, 2 stages, 4 microbatches; time 13, period 12, bubble 7.7 %
rank 0 |F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 ...| 7.7 %
rank 1 |...F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 | 7.7 %
)");
  CHECK("\n" + to_picture_text(simulate(with_communication(zbv(2, 1)))) == R"(
zbv: 2 ranks, 4 stages, 1 microbatch; time 10, bubble 40.0 %
rank 0 |0F0 ........3F0 3I0 3W0 ........0I0 0W0 | 40.0 %
rank 1 |....1F0 2F0 ........2I0 2W0 1I0 1W0 ....| 40.0 %
)");
}

TEST_CASE("A narrow picture keeps its width and its kinds", "[pipeline]") {
  Costs costs;
  costs.backward_weight = {0};
  const auto timeline = simulate(zb_h1(11, 1, 30), costs);
  for (const int columns : {1, 20, 60, 100, 400}) {
    const auto lines = lines_of(to_picture_text(timeline, columns));
    REQUIRE(lines.size() == 12);
    CHECK(lines[1].substr(0, 9) == "rank  0 |");
    CHECK(lines[11].substr(0, 9) == "rank 10 |");
    for (size_t rank = 0; rank < 11; ++rank) {
      const auto& line = lines[rank + 1];
      const auto end = line.rfind('|');
      CHECK(static_cast<int>(end - 9) <= columns);
      CHECK(end == lines[1].rfind('|'));
      CHECK(line.find('W') == std::string::npos);  // it takes no time
    }
  }
  CHECK_THAT(to_picture_text(timeline, 60), Contains("F") && Contains("I"));
  CHECK_THROWS_WITH(to_picture_text(timeline, -1), Contains("(columns: -1)"));
  costs.forward = costs.backward_input = {0};
  CHECK(lines_of(to_picture_text(simulate(gpipe(1, 1), costs)))[1] == "rank 0 || 0.0 %");
}

TEST_CASE("A drawing has a cell with a tooltip for each action", "[pipeline]") {
  const auto schedule = with_communication(interleaved_1f1b(4, 3, 8));
  const auto svg = to_picture_svg(simulate(schedule));
  CHECK(count_of(svg, "<title>") == 4 * 3 * 8 * 2);
  CHECK_THAT(svg, Contains("<title>11B7: 57 to 59</title>"));
  CHECK_THAT(
      svg,
      Contains("interleaved_1f1b: 4 ranks, 12 stages, 8 microbatches; time 81, bubble 11.1 %"));
  CHECK_THAT(svg, Contains("forward (F)") && Contains("backward (B)") && Contains("rank 3"));
  CHECK(svg.find("weights") == std::string::npos);
  CHECK(count_of(svg, "nan") + count_of(svg, "inf\"") == 0);
  CHECK(svg.size() < 60'000);
  // Lighter and darker: a colour for each of a rank's three stages and two kinds, two in the legend, rows, ground.
  std::vector<std::string> fills;
  for (auto at = svg.find("fill=\""); at != std::string::npos; at = svg.find("fill=\"", at + 1)) {
    const auto fill = svg.substr(at + 6, 7);
    if (std::find(fills.begin(), fills.end(), fill) == fills.end()) {
      fills.push_back(fill);
    }
  }
  CHECK(fills.size() == 6 + 2 + 2);
}

TEST_CASE("A drawing is as wide as its title, to a limit", "[pipeline]") {
  const auto width_of = [](const std::string& name) {
    auto schedule = gpipe(1, 1);
    schedule.name = name;
    const auto svg = to_picture_svg(simulate(schedule));
    return std::stod(svg.substr(svg.find("width=\"") + 7));
  };
  const double short_name = width_of("a");
  CHECK(width_of(std::string(120, 'a')) > 120 * 8);
  CHECK(width_of("b") == short_name);
  CHECK(width_of(std::string(100'000, 'a')) < 4000);
}

TEST_CASE("A drawing of nothing, and of a name that is markup, is a drawing", "[pipeline]") {
  auto schedule = gpipe(1, 1);
  schedule.name = "<a> & \x01 \"b\"";
  Costs nothing;
  nothing.forward = nothing.backward_input = nothing.backward_weight = {0};
  const auto svg = to_picture_svg(simulate(schedule, nothing));
  CHECK_THAT(svg,
             Contains("&lt;a&gt; &amp;   &quot;b&quot;: 1 rank, 1 stage, 1 microbatch; time 0"));
  CHECK(count_of(svg, "<title>") == 0);
  CHECK(count_of(svg, "nan") + count_of(svg, "inf") == 0);
}

}  // namespace test_picture
