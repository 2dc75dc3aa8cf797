#include <ATen/ATen.h>
#include <brimful/memory/fault.h>
#include <brimful/memory/stats.h>
#include <brimful/probes/oom_report.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "memory/oom_observer.h"
#include "support/catch.h"
#include "support/page_data.h"

namespace test_oom_report {

using namespace brimful;
using namespace brimful::probes;
using memory::Category;

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

OomFacts facts_of(int64_t used_mib, int64_t request_mib) {
  OomFacts facts;
  facts.used_bytes = used_mib * kMiB;
  facts.request_bytes = request_mib * kMiB;
  facts.limit_bytes = (used_mib + request_mib - 1) * kMiB;
  facts.place = "train.py:7";
  return facts;
}

int64_t& of(OomFacts& facts, Category category) {
  return facts.by_category[static_cast<size_t>(category)];
}

OomFacts fragments(bool expandable) {
  auto facts = facts_of(50, 20);
  facts.device = "cuda:0";
  facts.fragmentation.emplace();
  facts.fragmentation->free_bytes = 40 * kMiB;
  facts.fragmentation->largest_free_bytes = 10 * kMiB;
  facts.expandable_segments = expandable;
  return facts;
}

/// The message of a refusal at `site`.
std::string refusal(const std::string& site) {
  const memory::SiteScope scope(site);
  const memory::FaultAt fault(0);
  try {
    at::empty({1024});
  } catch (const c10::OutOfMemoryError& error) {
    return error.what_without_backtrace();
  }
  return {};
}

}  // namespace

TEST_CASE("advice does not name what is in use already", "[oom_report]") {
  const auto has = [](const OomFacts& facts, const std::string& words) {
    return findings(facts).front().advice.find(words) != std::string::npos;
  };
  CHECK(findings(fragments(false)).front().cause == OomCause::fragmentation);
  CHECK(has(fragments(false), "expandable_segments:True"));
  CHECK_FALSE(has(fragments(true), "expandable_segments"));

  auto facts = facts_of(90, 10);
  facts.phase = memory::Phase::forward;
  of(facts, Category::activations) = 80 * kMiB;
  CHECK(findings(facts).front().cause == OomCause::activations);
  CHECK(has(facts, "BatchSizer"));
  facts.program.emplace();
  facts.program->uses_sizer = true;
  CHECK_FALSE(has(facts, "BatchSizer"));
}

TEST_CASE("the short form has at most twelve lines and the page is safe", "[oom_report]") {
  auto facts = facts_of(90, 10);
  facts.sites.assign(12, {"<script>.py:1", memory::Phase::forward, kMiB, 1});
  facts.growing.assign(5, {"train.py:8", 4, 30 * kMiB});
  const auto text = to_short_string(facts);
  CHECK(std::count(text.begin(), text.end(), '\n') <= 12);
  const auto page = to_html(facts);
  CHECK(page.find("<script>.py") == std::string::npos);
  CHECK(page_data(page)["lines"].at(11)["line"] == "<script>.py:1");
  CHECK(findings(OomFacts{}).empty());
}

TEST_CASE("the page has its origin, and the largest category first", "[oom_report]") {
  auto facts = facts_of(90, 10);
  of(facts, Category::parameters) = 5 * kMiB;
  of(facts, Category::activations) = 70 * kMiB;
  of(facts, Category::gradients) = 15 * kMiB;
  facts.origin = {"node<7>", "python train.py", 42, 1'767'225'600'000'000'000};
  const auto data = page_data(to_html(facts));
  CHECK(data["origin"] == "python train.py (pid 42) on host node<7>, 2026-01-01 00:00:00 UTC");
  const auto& rows = data["categories"];
  REQUIRE(rows.size() == 3);
  CHECK(rows[0] == nlohmann::json{{"category", "activations"}, {"bytes", 70 * kMiB}});
  CHECK(rows[1]["category"] == "gradients");
  CHECK(rows[2]["category"] == "parameters");
}

TEST_CASE("a refusal names what filled the memory while tracking is on", "[oom_report]") {
  watch_ooms();
  CHECK(refusal("untracked").find("In use") == std::string::npos);
  memory::start_tracking();
  const memory::SiteScope scope("the big one");
  const auto held = at::empty({kMiB});
  const auto words = refusal("the last straw");
  memory::stop_tracking();
  CHECK(words.find("Asked for 4.0 KiB at the last straw") != std::string::npos);
  CHECK(words.find("4.0 MiB at the big one") != std::string::npos);
  const auto last = last_oom();
  REQUIRE(last);
  CHECK(last->request_bytes == 4096);
  CHECK(last->origin.pid == getpid());
  CHECK(last->origin.command.find("brimful_tests") != std::string::npos);
  CHECK(last->sites.front().place == "the big one");
}

TEST_CASE("gradients are of this step or of one before, and lines grow by steps", "[oom_report]") {
  watch_ooms();
  memory::start_tracking();
  std::vector<at::Tensor> kept;
  for (int step = 0; step < 6; ++step) {
    const memory::SiteScope scope("grows");
    const memory::PhaseScope phase(memory::Phase::backward);
    kept.push_back(at::empty({256 * (step + 1)}));
    if (step < 5) {
      memory::mark_step();
    }
  }
  refusal("the sixth step");
  memory::stop_tracking();
  const auto last = last_oom();
  REQUIRE(last);
  CHECK(last->step == 5);
  CHECK(last->step_gradient_bytes == 1024 * 6);
  CHECK(last->kept_gradient_bytes == 1024 * (1 + 2 + 3 + 4 + 5));
  CHECK(last->sites.front().blocks == 6);
  CHECK(last->tracked_bytes == 1024 * 21);
  CHECK(last->earlier_forward);
  REQUIRE(last->growing.size() == 1);
  CHECK(last->growing.front().place == "grows");
  CHECK(last->growing.front().steps == 3);  // all but the first and the last two
}

TEST_CASE("a retried attempt's page is written once, when it is asked for", "[oom_report]") {
  const auto path = std::filesystem::temp_directory_path() /
                    ("brimful_oom_" + std::to_string(::getpid()) + ".html");
  watch_ooms();
  set_oom_report_path(path.string());
  memory::start_tracking();
  {
    const memory::RetryScope retries;
    refusal("retried");
  }
  CHECK_FALSE(std::filesystem::exists(path));
  write_pending_oom_report();
  CHECK(std::filesystem::remove(path));
  write_pending_oom_report();
  CHECK_FALSE(std::filesystem::exists(path));
  refusal("not retried");
  memory::stop_tracking();
  set_oom_report_path(std::nullopt);
  CHECK(std::filesystem::remove(path));
}

TEST_CASE("an observer that runs out of memory itself is not asked again", "[oom_report]") {
  static int calls = 0;
  memory::set_oom_observer([](c10::Device, int64_t, bool) -> std::string {
    ++calls;
    at::empty({int64_t{1} << 46});  // no limit holds it, and the system has not so much
    return "never";
  });
  memory::start_tracking();
  const auto words = refusal("outside");
  memory::stop_tracking();
  watch_ooms();
  CHECK(calls == 1);
  CHECK(words.find("never") == std::string::npos);
  CHECK(words.find("CPU out of memory") != std::string::npos);
}

TEST_CASE("an attempt that is retried asks no other observer", "[oom_report]") {
  watch_ooms();
  memory::start_tracking();
  {
    const memory::RetryScope retries;
    CHECK(refusal("retried").find("at retried") != std::string::npos);
    CHECK_FALSE(last_oom()->others_bytes);
  }
  CHECK(refusal("not retried").find("at not retried") != std::string::npos);
  CHECK(last_oom()->others_bytes);
  memory::stop_tracking();
}

}  // namespace test_oom_report
