#include "support/catch.h"

#include <brimful/pipeline/checker.h>
#include <brimful/pipeline/schedule_text.h>
#include <brimful/pipeline/schedules.h>
#include <c10/util/Exception.h>

#include <functional>

#include "pipeline/mutations.h"

namespace test_schedules {

using namespace brimful::pipeline;
using brimful::test::is_defined;
using Catch::Contains;

namespace {
/// Calls `test` with every built-in for 1 to 8 ranks, 1 to 4 stages a rank and 1 to 20 microbatches; returns how many.
int for_each_built_in(const std::function<void(const Schedule&)>& test) {
  int count = 0;
  for (const auto& name : schedule_names()) {
    for (int stages_per_rank = 1; stages_per_rank <= 4; ++stages_per_rank) {
      for (int ranks = 1; ranks <= 8 && is_defined(name, stages_per_rank); ++ranks) {
        for (int microbatches = 1; microbatches <= 20; ++microbatches) {
          test(make_schedule(name, ranks, stages_per_rank, microbatches));
          ++count;
        }
      }
    }
  }
  return count;
}

std::string describe(const Schedule& schedule) {
  return schedule.name + " of " + std::to_string(schedule.ranks.size()) + " ranks, " +
         std::to_string(schedule.stages) + " stages, " + std::to_string(schedule.microbatches) +
         " microbatches";
}

void require_ok(const Schedule& schedule, const CheckOptions& options = {}) {
  const auto result = check(schedule, options);
  if (!result.ok()) {
    FAIL(describe(schedule) << ": " << result.to_string());
  }
}
}  // namespace

TEST_CASE("Every built-in schedule is valid, with and without communication", "[pipeline]") {
  const int count = for_each_built_in([](const Schedule& schedule) {
    require_ok(schedule);
    const auto complete = with_communication(schedule);
    require_ok(complete);
    require_ok(complete, {std::nullopt, ChannelKind::by_stage});
    const auto early = with_communication(schedule, ReceivePlace::when_sent);
    require_ok(early, {0, ChannelKind::by_rank});
    require_ok(early, {0, ChannelKind::by_stage});
  });
  CHECK(count == 3360);
}

TEST_CASE("Communication adds a send and a receive for each hop and nothing else", "[pipeline]") {
  for_each_built_in([](const Schedule& schedule) {
    const auto ranks = rank_of_stage(schedule);
    int hops = 0;
    for (int stage = 0; stage + 1 < schedule.stages; ++stage) {
      hops += ranks[stage] != ranks[stage + 1] ? 1 : 0;
    }
    const int messages = hops * schedule.microbatches * (has_backward(schedule) ? 2 : 1);
    for (const auto place : {ReceivePlace::before_use, ReceivePlace::when_sent}) {
      auto complete = with_communication(schedule, place);
      int added = 0;
      for (auto& actions : complete.ranks) {
        added += static_cast<int>(
            std::erase_if(actions, [](const Action& action) { return !is_compute(action.kind); }));
      }
      if (added != 2 * messages || complete.ranks != schedule.ranks) {
        FAIL(describe(schedule) << ": " << added << " added for " << messages << " messages");
      }
    }
  });
}

TEST_CASE("Orders of the built-ins", "[pipeline]") {
  CHECK(to_csv(gpipe(2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n");
  CHECK(to_csv(one_forward_one_backward(3, 4)) ==
        "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n"
        "1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3\n"
        "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3\n");
  CHECK(to_csv(one_forward_one_backward(3, 1)) == "0F0,0B0\n1F0,1B0\n2F0,2B0\n");
  CHECK(to_csv(interleaved_1f1b(2, 2, 2)) ==
        "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n"
        "1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n");
  // Rounds of three and two.
  CHECK(to_csv(interleaved_1f1b(2, 2, 5)) ==
        "0F0,0F1,0F2,2F0,2F1,2F2,2B0,0F3,2B1,0F4,2B2,2F3,0B0,2F4,0B1,0B2,2B3,2B4,0B3,0B4\n"
        "1F0,1F1,1F2,3F0,3B0,3F1,3B1,3F2,3B2,1F3,1B0,1F4,1B1,3F3,1B2,3F4,3B3,3B4,1B3,1B4\n");
  CHECK(to_csv(looped_bfs(2, 2, 2)) ==
        "0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0\n"
        "1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0\n");
  CHECK(to_csv(zb_h1(2, 1, 3)) ==
        "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2\n"
        "1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n");
  CHECK(to_csv(zb_h2(2, 3)) ==
        "0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2,0W2\n"
        "1F0,1I0,1F1,1I1,1F2,1I2,1W0,1W1,1W2\n");
  CHECK(to_csv(zbv(1, 2)) == "0F0,1F0,1I0,1W0,0F1,0I0,0W0,1F1,1I1,1W1,0I1,0W1\n");
  CHECK(to_csv(dualpipev(1, 2)) == "0F0,1F0,0F1,1B0,1F1,0B0,1B1,0I1,0W1\n");
  CHECK(to_csv(forward_only(2, 2, 3)) == "0F0,0F1,0F2,2F0,2F1,2F2\n1F0,1F1,1F2,3F0,3F1,3F2\n");
}

TEST_CASE("A schedule is refused where it is not defined", "[pipeline]") {
  CHECK_THROWS_AS(make_schedule("zbv", 2, 1, 4), c10::ValueError);
  CHECK_THROWS_WITH(
      make_schedule("zbv", 2, 1, 4),
      Contains("defined for 2 stages a rank only (schedule: zbv, stages_per_rank: 1)"));
  CHECK_THROWS_WITH(
      make_schedule("1f1b", 2, 2, 4),
      Contains("defined for 1 stage a rank only (schedule: 1f1b, stages_per_rank: 2); "
               "these take any number: interleaved_1f1b, looped_bfs, zb_h1"));
  CHECK_THROWS_WITH(make_schedule("2F1B", 2, 1, 4),
                    Contains("no schedule of this name (name: '2F1B'); take one of gpipe, 1f1b, "));
  CHECK(make_schedule("Schedule1F1B", 2, 1, 4).name == "1f1b");
  CHECK((make_schedule("ZBVZeroBubble", 2, 2, 4).ranks == zbv(2, 4).ranks));
  CHECK((make_schedule("InterleavedZeroBubble", 2, 2, 4).ranks == zb_h1(2, 2, 4).ranks));
  for (const auto& name : schedule_names()) {
    const int stages_per_rank = is_defined(name, 1) ? 1 : 2;
    CHECK_THROWS_WITH(make_schedule(name, 0, stages_per_rank, 4), Contains("(ranks: 0,"));
    CHECK_THROWS_WITH(make_schedule(name, 2, stages_per_rank, 0), Contains("microbatches: 0)"));
    CHECK_THROWS_WITH(make_schedule(name, 2, stages_per_rank, -3), Contains("microbatches: -3)"));
    CHECK_THROWS_WITH(make_schedule(name, 1 << 20, stages_per_rank, 1 << 20),
                      Contains("at most 16777216 forwards"));
  }
  CHECK_THROWS_WITH(make_schedule("looped_bfs", 2, 0, 4), Contains("stages_per_rank: 0"));
}

}  // namespace test_schedules
