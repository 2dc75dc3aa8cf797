#include "step/step_recorder.h"
#include "support/catch.h"

#include <chrono>

namespace test_report {

using brimful::Report;
using brimful::StepRecorder;
using brimful::to_string;

namespace {
using Time = StepRecorder::Clock::time_point;

Time ms(int count) {
  return Time() + std::chrono::milliseconds(count);
}

/// A step that stood at once, of 10 ms.
void plain_step(StepRecorder& recorder, int64_t peak, std::optional<int64_t> limit) {
  recorder.begin_attempt(ms(0));
  recorder.end_attempt(1, 8, peak, false);
  recorder.end_step(true, limit, ms(10));
}
}  // namespace

TEST_CASE("A report counts steps, retries and what they cost", "[sizer][report]") {
  StepRecorder recorder;
  recorder.end_step(true, 100, ms(0));  // no attempt: bad input
  CHECK(recorder.report(0).steps == 0);

  plain_step(recorder, 50, 100);
  recorder.begin_attempt(ms(100));
  recorder.end_attempt(1, 8, 90, true);
  recorder.note_retry(false, false);
  recorder.begin_attempt(ms(107));
  recorder.end_attempt(2, 4, 70, false);
  recorder.end_step(true, 100, ms(130));
  recorder.begin_attempt(ms(200));
  recorder.end_attempt(2, 4, 80, true);
  recorder.note_retry(true, true);
  recorder.begin_attempt(ms(205));
  recorder.end_attempt(2, 4, 40, true);
  recorder.end_step(false, 100, ms(210));

  const auto report = recorder.report(4);
  CHECK(report.steps == 2);
  CHECK(report.failed == 1);
  CHECK(report.retries == 2);
  CHECK(report.ooms == 3);
  CHECK(report.cache_releases == 1);
  CHECK(report.garbage_collections == 1);
  CHECK(report.piece_rows == 4);
  CHECK(report.peak_bytes == 80);
  CHECK(report.limit_bytes == 100);
  CHECK(report.last_fill == Approx(0.8));
  CHECK(report.most_fill == Approx(0.9));
  CHECK(report.mean_fill == Approx((0.5 + 0.9 + 0.8) / 3));
  CHECK(report.total_ms == Approx(50));
  CHECK(report.lost_ms ==
        Approx(17));  // 7 before the attempt that stood, 10 of the step that failed
  REQUIRE(report.history.size() == 3);
  CHECK(report.history[1].retries == 1);
  CHECK(report.history[1].piece_rows == 4);
  CHECK(report.history[1].lost_ms == Approx(7));
  CHECK(report.history[2].ooms == 2);
  CHECK_FALSE(report.history[2].stood);
  CHECK(to_string(report) ==
        "steps: 2 (failed: 1, retries: 2, out of memory here: 3, cache released: 1, garbage "
        "collected: 1)\n"
        "rows of a piece that fits: 4\n"
        "peak of the last step: 80 B (limit: 100 B)\n"
        "peak / limit: 80.0% in the last step, 73.3% on average, 90.0% at most\n"
        "time in steps: 50.0 ms, lost to repeated attempts: 17.0 ms (34.0%)");
}

TEST_CASE("A report without a limit has no fill", "[sizer][report]") {
  StepRecorder recorder;
  CHECK(to_string(recorder.report(0)) ==
        "steps: 0 (failed: 0, retries: 0, out of memory here: 0, cache released: 0, garbage "
        "collected: 0)\n"
        "rows of a piece that fits: not needed yet\n"
        "peak of the last step: unknown (limit: none)\n"
        "time in steps: 0.0 ms, lost to repeated attempts: 0.0 ms");
  plain_step(recorder, 60, 100);
  plain_step(recorder, 50, std::nullopt);
  plain_step(recorder, 50, 0);
  const auto report = recorder.report(0);
  CHECK_FALSE(report.last_fill);
  CHECK(report.mean_fill == Approx(0.6));
}

TEST_CASE("A report remembers the last 64 steps in order", "[sizer][report]") {
  StepRecorder recorder;
  for (int64_t step = 0; step < 150; ++step) {
    plain_step(recorder, step, std::nullopt);
  }
  const auto report = recorder.report(0);
  CHECK(report.steps == 150);
  REQUIRE(report.history.size() == 64);
  for (int64_t i = 0; i < 64; ++i) {
    CHECK(report.history[static_cast<size_t>(i)].peak_bytes == 86 + i);
  }
}

}  // namespace test_report
