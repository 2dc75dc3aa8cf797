#include "support/catch.h"

#include <brimful/memory/stats.h>
#include "step/retry.h"

#include <optional>
#include <vector>

namespace test_retry {

using namespace brimful;

namespace {
const c10::Device kCpu(c10::DeviceType::CPU);
using How = Ended::How;

/// Units of work of 64 rows, of which as many fit in a piece as `fits` says; their peaks are 100 bytes a row.
struct Work {
  RetryPolicy policy{{kCpu}};
  int64_t fits = 64;
  std::vector<int64_t> tried;  ///< pieces, of the last unit

  void run() {
    tried.clear();
    policy.measure();
    const auto before = memory::stats(kCpu).used_bytes;
    Retry retry(policy, 64, 8, policy.first(64, 1));
    retry.run([&]() -> Ended {
      const auto& plan = retry.plan();
      tried.push_back(plan.pieces);
      if (plan.piece_rows > fits) {
        return {How::ran_out, kCpu};
      }
      if (retry.retries() == 0) {
        policy.note_fit(plan, {{kCpu, before + 100 * plan.piece_rows}});
      }
      return {};
    });
  }
};
}  // namespace

TEST_CASE("A unit of work begins with what worked last time, and tries more after a while",
          "[sizer]") {
  Work work;
  work.fits = 16;
  work.run();
  CHECK(work.tried == std::vector<int64_t>{1, 2, 4});
  int64_t failures = 0;
  for (int unit = 0; unit < 100; ++unit) {
    work.run();
    failures += static_cast<int64_t>(work.tried.size()) - 1;
  }
  CHECK(failures >= 3);
  CHECK(failures <= 6);
  work.fits = 64;
  for (int unit = 0; unit < 400; ++unit) {
    work.run();
  }
  CHECK(work.tried == std::vector<int64_t>{1});
}

TEST_CASE("An even plan is doubled, and an uneven one by its largest piece", "[sizer]") {
  const RetryPolicy policy({kCpu});
  CHECK(policy.next(11, {5, 3}, 1, 8, kCpu).pieces == 10);
  CHECK(policy.next(12, {4, 6}, 1, 8, kCpu).pieces == 4);
}

TEST_CASE("What others need costs no retries, and what ranks agreed on is the next plan",
          "[sizer]") {
  RetryPolicy policy({kCpu});
  Retry retry(policy, 12, 2, ExecutionPlan::in_pieces(12, 1));
  const std::vector<Ended> ends{
      {How::for_others}, {How::as_it_was}, {How::ran_out, std::nullopt, 3}, {How::stands}};
  std::vector<int64_t> pieces;
  std::vector<bool> may_repeat;
  retry.run([&] {
    pieces.push_back(retry.plan().pieces);
    may_repeat.push_back(retry.may_repeat());
    return ends[pieces.size() - 1];
  });
  CHECK(pieces == std::vector<int64_t>{1, 1, 1, 3});
  CHECK(may_repeat == std::vector<bool>{true, true, true, false});
  CHECK(retry.retries() == 3);
  CHECK(policy.piece_rows() == 4);
  CHECK(policy.first(12, 1).pieces == 3);
}

}  // namespace test_retry
