#include <brimful/probes/summary.h>
#include <c10/util/Exception.h>
#include "support/catch.h"

namespace test_summary {

using namespace brimful::probes;

namespace {

StepSummary two_layers() {
  StepSummary summary;
  ModuleRow model;
  model.type = "Sequential";
  ModuleRow layer;
  layer.name = "0";
  layer.type = "List<Linear>";
  layer.depth = 1;
  layer.calls = 50;
  layer.trainable = 1234567;
  layer.inputs = {{8, 5}};
  layer.outputs = {{8, 16}, {}};
  layer.multiply_adds = 7654321;
  summary.modules = {model, layer};
  summary.mode = "train";
  summary.device = "cpu";
  summary.rows = 8;
  return summary;
}

}  // namespace

TEST_CASE("each span is charged to the modules that ran in it", "[summary]") {
  std::vector<ModuleRow> modules(3);
  charge(modules, {{{0}, false, 100, 10}, {{0, 1}, false, 300, 20}, {{0, 2}, true, 500, -30}});
  CHECK(modules[0].forward_peak_bytes == 300);
  CHECK(modules[0].backward_peak_bytes == 500);
  CHECK(modules[0].activation_bytes == 30);  // what backward frees does not count
  CHECK(modules[1].forward_peak_bytes == 300);
  CHECK(modules[1].activation_bytes == 20);
  CHECK(modules[2].forward_peak_bytes == 0);
  CHECK(modules[2].backward_peak_bytes == 500);
}

TEST_CASE("a module that calls itself is charged once", "[summary]") {
  std::vector<ModuleRow> modules(1);
  charge(modules, {{{0, 0}, false, 100, 10}});
  CHECK(modules[0].activation_bytes == 10);
}

TEST_CASE("a span of no module's row is refused", "[summary]") {
  std::vector<ModuleRow> modules(1);
  CHECK_THROWS_AS(charge(modules, {{{1}, false, 0, 0}}), c10::IndexError);
}

TEST_CASE("the table shows shapes, calls and grouped numbers", "[summary]") {
  const std::string table = to_string(two_layers());
  CHECK(table.find("\n  0 (List<Linear>)") != std::string::npos);
  CHECK(table.find("8 x 16, scalar") != std::string::npos);
  CHECK(table.find("8 x 5") != std::string::npos);
  CHECK(table.find("7,654,321") != std::string::npos);
  CHECK(table.find("50") != std::string::npos);
  CHECK(table.find("1,234,567") != std::string::npos);
  CHECK(table.find("largest batch") == std::string::npos);
}

TEST_CASE("the table says what a prediction may be short by", "[summary]") {
  auto summary = two_layers();
  summary.peak_bytes = 3 << 20;
  summary.predicted_bytes = 3 << 20;
  CHECK(to_string(summary).find("short by") == std::string::npos);
  summary.margin_bytes = 1 << 20;
  summary.workspaces_unknown = true;
  const std::string table = to_string(summary);
  CHECK(table.find("predicted from small batches 3.0 MiB, may be short by 1.0 MiB, without the "
                   "workspaces that cuDNN's benchmark mode tries") != std::string::npos);
}

TEST_CASE("the page escapes what modules are called", "[summary]") {
  const std::string page = to_html(two_layers());
  CHECK(page.find("0 (List&lt;Linear&gt;)") != std::string::npos);
  CHECK(page.find("List<Linear>") == std::string::npos);
}

}  // namespace test_summary
