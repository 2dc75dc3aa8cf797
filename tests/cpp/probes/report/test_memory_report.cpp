#include <brimful/probes/memory_report.h>

#include <nlohmann/json.hpp>

#include "support/catch.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <numeric>
#include <random>

#include "probes/report/timeline.h"
#include "support/page_data.h"

namespace test_memory_report {

using namespace brimful::memory;
using namespace brimful::probes;

namespace {

/// A few steps of a small model; `own` is what peak_by_category says of them.
Recording trained(Peak* own = nullptr) {
  start_recording();
  const SiteScope loop("loop");
  auto weight = at::randn({64, 64}).requires_grad_();
  for (int step = 0; step < 3; ++step) {
    const auto batch = at::randn({32, 64});
    at::Tensor y;
    {
      const SiteScope scope("product");
      y = batch.mm(weight).exp();
    }
    y.sum().backward();
    {
      const PhaseScope scope(Phase::optimizer);
      const at::NoGradGuard no_grad;
      weight.sub_(weight.grad() * 0.01);
    }
    weight.mutable_grad() = at::Tensor();
    mark_step();
  }
  const std::vector labels{*label_of(weight.storage(), Category::parameters)};
  if (own != nullptr) {
    *own = peak_by_category(c10::DeviceType::CPU, labels);
  }
  return stop_recording(labels);
}

/// So many events, with one short peak.
DeviceRecording made_up(size_t events, size_t at_peak) {
  DeviceRecording device;
  std::mt19937 random(0);
  std::vector<uint32_t> live;
  for (size_t k = 0; k < events; ++k) {
    RecordedEvent event;
    event.time_ns = static_cast<int64_t>(k) * 1000;
    const bool is_birth = k == at_peak || live.empty() || (k != at_peak + 1 && random() % 2 == 0);
    if (is_birth) {
      RecordedBlock block;
      block.bytes = k == at_peak ? int64_t{1} << 40 : static_cast<int64_t>(random() % 5000 + 1);
      block.site = random() % 50;
      block.category = static_cast<Category>(random() % kCategories);
      event.block = static_cast<uint32_t>(device.blocks.size());
      live.push_back(event.block);
      device.blocks.push_back(block);
    } else {
      event.kind = EventKind::death;
      const size_t which = k == at_peak + 1 ? live.size() - 1 : random() % live.size();
      event.block = live[which];
      live[which] = live.back();
      live.pop_back();
    }
    device.events.push_back(event);
  }
  return device;
}

Recording recording_of(DeviceRecording device) {
  Recording recording;
  recording.duration_ns = device.events.empty() ? 0 : device.events.back().time_ns;
  recording.sites.resize(50);
  recording.devices.push_back(std::move(device));
  return recording;
}

std::vector<int64_t> summed(const nlohmann::json& differences) {
  auto values = differences.get<std::vector<int64_t>>();
  std::partial_sum(values.begin(), values.end(), values.begin());
  return values;
}

}  // namespace

TEST_CASE("The recording's peak is the live table's, by category and line", "[probes][report]") {
  Peak own;
  const auto recording = trained(&own);
  const auto peak = peak_of(recording.devices[0]);
  CHECK(peak.bytes == own.bytes);
  CHECK(peak.by_category == own.by_category);
  CHECK(peak.step == own.step);
  CHECK(peak.phase == own.phase);
  CHECK(peak.before_bytes == own.before_bytes);
  REQUIRE(peak.by_site.size() == own.by_site.size());
  CHECK(peak.by_category[static_cast<size_t>(Category::activations)] > 0);
  for (const auto& site : own.by_site) {
    const auto same = std::find_if(peak.by_site.begin(), peak.by_site.end(), [&](const auto& s) {
      return to_string(recording.sites[s.site]) == to_string(brimful::memory::site(site.site)) &&
             s.category == site.category;
    });
    REQUIRE(same != peak.by_site.end());
    CHECK(same->bytes == site.bytes);
    CHECK(same->blocks == site.blocks);
  }
}

TEST_CASE("Few columns keep the peak of many events", "[probes][report]") {
  const auto device = made_up(20'000, 12'345);
  const auto exact = timeline_of(device, device.events.size());
  CHECK(exact.columns.size() == device.events.size() + 1);
  for (const size_t columns : {1, 7, 100, 4096}) {
    const auto timeline = timeline_of(device, columns);
    CHECK(timeline.columns.size() <= columns + 1);
    int64_t most = 0;
    for (const auto& column : timeline.columns) {
      most = std::max(most, column.used_bytes());
    }
    CHECK(most == exact.peak.bytes);
    CHECK(most > int64_t{1} << 40);
    CHECK(timeline.peak_ns == 12'345'000);
  }
}

TEST_CASE("Activations of an earlier step are other", "[probes][report]") {
  DeviceRecording device;
  device.blocks = {{.bytes = 10, .phase = Phase::forward, .category = Category::activations}};
  device.events = {{.time_ns = 1}, {.time_ns = 2, .kind = EventKind::step, .block = 1}};
  const auto columns = timeline_of(device, 10).columns;
  REQUIRE(columns.size() == 3);
  CHECK(columns[1].by_category[static_cast<size_t>(Category::activations)] == 10);
  CHECK(columns[2].by_category[static_cast<size_t>(Category::activations)] == 0);
  CHECK(columns[2].by_category[static_cast<size_t>(Category::other)] == 10);
}

TEST_CASE("A page has the numbers of its recording", "[probes][report]") {
  const auto recording = trained();
  const auto page = to_html({recording});
  CHECK(page.find("http") == page.find("http://www.w3.org/2000/svg"));  // nothing is fetched
  const auto data = page_data(page);
  CHECK(data["title"] == "Memory of cpu");
  const auto timeline = data["timelines"].at(0);
  CHECK(std::any_of(timeline["peak"]["lines"].begin(), timeline["peak"]["lines"].end(),
                    [](const auto& row) { return row["line"] == "product"; }));
  const auto peak = peak_of(recording.devices[0]);
  CHECK(timeline["peak"]["bytes"] == peak.bytes);
  std::vector<int64_t> used(recording.devices[0].events.size() + 1, 0);
  for (const auto& series : timeline["category"]) {
    const auto values = summed(series["values"]);
    REQUIRE(values.size() == used.size());
    std::transform(values.begin(), values.end(), used.begin(), used.begin(), std::plus<>());
  }
  CHECK(*std::max_element(used.begin(), used.end()) == peak.bytes);
  std::vector<int64_t> by_line(used.size(), 0);
  for (const auto& series : timeline["line"]) {
    const auto values = summed(series["values"]);
    std::transform(values.begin(), values.end(), by_line.begin(), by_line.begin(), std::plus<>());
  }
  CHECK(by_line == used);
  CHECK(summed(timeline["step"]).back() == 3);
}

TEST_CASE("A page of nothing has nothing", "[probes][report]") {
  const auto nothing = page_data(to_html({recording_of({})}))["timelines"].at(0);
  CHECK(nothing["events"] == 0);
  CHECK(nothing["peak"]["lines"].empty());
  CHECK(page_data(to_html({Recording{}}))["timelines"].empty());
  CHECK(page_data(to_html({}))["timelines"].empty());
  const auto both = page_data(to_html_difference(recording_of({}), Recording{}));
  CHECK(both["devices"].at(0)["categories"]["rows"].empty());
  CHECK(both["devices"].at(0)["lines"]["rows"].empty());
}

TEST_CASE("Names cannot leave their place in the page", "[probes][report]") {
  auto recording = recording_of(made_up(100, 50));
  for (auto& site : recording.sites) {
    site.function = "</script><script>alert(1)</script>\xff";
  }
  for (const auto& page : {to_html({recording}), to_html_difference(recording, Recording{})}) {
    CHECK(page.find("alert(1)</script>") == std::string::npos);
    CHECK(page.find("<script>alert") == std::string::npos);
    CHECK(page.find('\xff') == std::string::npos);
  }
}

TEST_CASE("The page names its files and where they are of", "[probes][report]") {
  auto recording = recording_of(made_up(10, 5));
  recording.path = "a<b>.brimful";
  recording.origin = {"node7", "python train.py", 42, 1'767'225'600'000'000'000};
  const nlohmann::json source{
      {"file", "a<b>.brimful"},
      {"origin", "python train.py (pid 42) on host node7, 2026-01-01 00:00:00 UTC"}};
  CHECK(page_data(to_html({recording}))["sources"] == nlohmann::json::array({source}));
  CHECK(page_data(to_html_difference(recording, recording))["sources"].at(1) == source);
  CHECK(page_data(to_html(std::vector(4, recording)))["sources"].size() == 4);
}

TEST_CASE("What the ring lost is on the page", "[probes][report]") {
  auto device = made_up(10, 5);
  device.lost_events = 1234;
  device.peak_bytes = int64_t{1} << 50;
  const auto timeline = page_data(to_html({recording_of(std::move(device))}))["timelines"].at(0);
  CHECK(timeline["lost_events"] == 1234);
  CHECK(timeline["most_bytes"] == int64_t{1} << 50);
}

TEST_CASE("Two runs are compared by category and line", "[probes][report]") {
  auto before = recording_of(made_up(100, 50));
  before.sites[1].function = "grows";
  auto after = before;
  for (auto& block : after.devices[0].blocks) {
    if (block.bytes == int64_t{1} << 40) {
      block.bytes += 3 << 20;
      block.site = 1;
    }
  }
  for (auto& block : before.devices[0].blocks) {
    if (block.bytes == int64_t{1} << 40) {
      block.site = 1;
    }
  }
  const auto data = page_data(to_html_difference(before, after));
  const auto& rows = data["devices"].at(0)["lines"]["rows"];
  REQUIRE(rows.size() == 1);
  CHECK(rows[0]["line"] == "grows");
  CHECK(rows[0]["after"].get<int64_t>() - rows[0]["before"].get<int64_t>() == 3 << 20);
  CHECK(data["timelines"].size() == 2);
}

TEST_CASE("Ranks share a page", "[probes][report]") {
  auto first = recording_of(made_up(100, 50));
  auto second = recording_of(made_up(200, 60));
  second.rank = 1;
  second.origin.unix_ns = 5'000'000;
  const auto data = page_data(to_html({first, second}))["timelines"];
  REQUIRE(data.size() == 2);
  CHECK(data[1]["name"] == "rank 1, cpu");
  CHECK(data[1]["offset_us"] == 5000);
}

TEST_CASE("A page of many events is small", "[probes][report]") {
  const auto page = to_html({recording_of(made_up(300'000, 1234))});
  CHECK(page.size() < size_t{3} << 20);
}

TEST_CASE("A trace has counters that add up, and steps", "[probes][report]") {
  const auto recording = trained();
  const auto trace = nlohmann::json::parse(to_chrome_trace({recording}));
  double most = 0;
  size_t steps = 0;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "C") {
      double used = 0;
      for (const auto& value : event["args"]) {
        used += value.get<double>();
      }
      most = std::max(most, used);
    }
    steps += event["ph"] == "X" ? 1 : 0;
  }
  CHECK(most == static_cast<double>(peak_of(recording.devices[0]).bytes));
  CHECK(steps == 4);
}

}  // namespace test_memory_report
